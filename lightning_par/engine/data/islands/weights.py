"""The weights that count, in fragments: merged from what islands learned, saved, and read again."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.optim import SGD

from lightning_par.checkpoint.storage import replacing, sync_files
from lightning_par.dtensor import Box, narrowed
from lightning_par.engine.data.islands.coding import Coded, encode
from lightning_par.engine.data.islands.options import Outer

__all__ = ["Fragment", "Movement", "SharedWeights", "balance", "load_weights"]


@dataclass(eq=False)
class Fragment:
    """A part of the model that is exchanged at once.

    Attributes:
        names: Its parameters.
        version: How often it was merged.
        counted: Island -> ticket of the last movement of it that was merged.
        shares: Island -> its steps in a second then, as a part of those of the fastest.
        places: Island -> the step at which that movement left, and its place in the data then.
    """

    names: list[str]
    version: int = 0
    counted: dict[str, str] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)
    places: dict[str, tuple[int, Any]] = field(default_factory=dict)


class Movement(NamedTuple):
    """What the movement of an island was like.

    Attributes:
        norm: Its length, over all parameters of the fragment.
        agreement: Cosine of the angle between it and the mean of all, -1 to 1; 0 without either.
    """

    norm: float
    agreement: float


class SharedWeights:
    """The weights that all islands share, and the state of the outer optimizer.

    Note [Two copies]: `shown` is what the islands hold, to the bit: the sum of the encoded updates.
    `exact` is what the outer optimizer made. Their difference is what encoding has left out so far,
    and is part of the next update. Without encoding they are one.

    Args:
        outer: The options of the run.
        tensors: Global FQN -> whole parameter, in float32 or float64, on the CPU.
        trained: Names of those that change.
        era: Random name of this run, for which versions count.
    """

    def __init__(
        self, outer: Outer, tensors: Mapping[str, Tensor], trained: Collection[str], era: str
    ) -> None:
        self.outer, self.era, self.step = outer, era, 0
        self.exact = dict(tensors)
        copies = outer.quantize != "none"
        # Without encoding both names stand for one tensor, and nothing can differ.
        self.shown = {n: t.clone() if copies else t for n, t in self.exact.items()}
        self.frozen = sorted(self.exact.keys() - set(trained))
        sizes = {name: self.exact[name].numel() for name in trained}
        self.fragments = [Fragment(names) for names in balance(sizes, outer.fragments)]
        assert outer.lr is not None
        assert outer.momentum is not None
        # The mean movement is a gradient: `shared - own` points from own to shared.
        self._optimizer = SGD(
            [self.exact[name] for fragment in self.fragments for name in fragment.names],
            lr=outer.lr,
            momentum=outer.momentum,
            nesterov=outer.optimizer == "nesterov",
        )

    @torch.no_grad()
    def merge(
        self, number: int, movements: Sequence[tuple[float, Sequence[tuple[Box, Tensor]]]]
    ) -> tuple[dict[str, Coded], list[Movement]]:
        """Make one step of the outer optimizer.

        Args:
            number: Of the fragment.
            movements: For each island its weight, and the boxes of ``shared - own`` weights. The
                weights sum to 1.

        Returns:
            The encoded update of every parameter, and what the movements were like.
        """
        fragment = self.fragments[number]
        means = {name: torch.zeros_like(self.exact[name]) for name in fragment.names}
        for weight, boxes in movements:
            for box, values in boxes:
                # Weighted as it comes, without a whole copy for each island.
                narrowed(means[box.name], box).add_(values, alpha=weight)
        seen = [_look(boxes, means) for _, boxes in movements]
        for name, mean in means.items():
            # Parameters without a gradient are passed over: only this fragment makes a step.
            self.exact[name].grad = mean
        self._optimizer.step()
        self._optimizer.zero_grad()
        fragment.version += 1
        if self.outer.quantize == "none":
            return {}, seen
        updates = {}
        for name in fragment.names:
            updates[name] = encode(self.exact[name] - self.shown[name], self.outer.quantize)
            # What arrives, rounded: the rest stays in `exact - shown`, and is part of the next
            # update.
            self.shown[name] += updates[name].values(self.shown[name].dtype)
        return updates, seen

    def whole(self, box: Box) -> bytes:
        """Return the bytes of a box of the weights that the islands hold."""
        return encode(self.shown[box.name], "none").pack(box)

    def place(self, island: int) -> Any:
        """Return where the data of an island stood at its last movement that was merged; None: it
        has sent none, or has finished its run.
        """
        held = [f.places[str(island)] for f in self.fragments if str(island) in f.places]
        # Of several fragments, the movement that left last.
        return max(held, key=lambda place: place[0])[1] if held else None

    def save(self, folder: Path, number: int) -> None:
        """Save one fragment; the file is complete, or it is the one before.

        Raises:
            OSError: The disk is full, for example.
        """
        fragment = self.fragments[number]
        parts = {"exact": self.exact, "momentum": self._momenta()}
        if self.outer.quantize != "none":
            parts["shown"] = self.shown
        # Frozen parameters are saved once, with the first fragment.
        names = [*fragment.names, *(self.frozen if number == 0 else ())]
        tensors = {f"{k}/{n}": held[n] for k, held in parts.items() for n in names if n in held}
        about = {**vars(fragment), "era": self.era, "step": self.step}
        about["outer"] = self.outer.agreement()
        folder.mkdir(parents=True, exist_ok=True)
        # Written beside it and renamed: a reader finds a whole file of one version.
        with replacing(_file(folder, number, len(self.fragments))) as partial:
            save_file(tensors, partial, {"islands": json.dumps(about)})
        sync_files([folder])

    def _momenta(self) -> dict[str, Tensor]:
        state = self._optimizer.state
        found = {n: state.get(t, {}).get("momentum_buffer") for n, t in self.exact.items()}
        return {name: value for name, value in found.items() if value is not None}

    def restore(self, fragments: list[Fragment], step: int, rest: Mapping[str, Any]) -> None:
        """Take what was saved beside the exact weights: versions, momenta, and what is shown."""
        self.fragments, self.step = fragments, step
        for key, value in rest.items():
            kind, _, name = key.partition("/")
            if kind == "shown":
                self.shown[name] = value
            else:
                self._optimizer.state[self.exact[name]]["momentum_buffer"] = value


def load_weights(folder: Path) -> SharedWeights | None:
    """Return what `SharedWeights.save` wrote of every fragment; None: a fragment is not there, or
    is of another run, as when a server ended before the run had begun.
    """
    first = next(iter(sorted(folder.glob("fragment-0-of-*.safetensors"))), None)
    if first is None:
        return None
    count = int(first.stem.rpartition("-")[2])
    tensors: dict[str, Tensor] = {}
    about = []
    for number in range(count):
        file = _file(folder, number, count)
        if not file.is_file():
            return None
        with safe_open(file, "pt") as stored:
            about.append(json.loads(stored.metadata()["islands"]))
            tensors |= {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    # Fragments of several runs in one folder: the server ended before it saved all of a new one.
    if len({each["era"] for each in about}) != 1:
        return None
    fragments = [
        Fragment(**{f.name: each[f.name] for f in fields(Fragment) if f.name in each})
        for each in about
    ]
    exact = {k.partition("/")[2]: t for k, t in tensors.items() if k.startswith("exact/")}
    trained = [name for fragment in fragments for name in fragment.names]
    found = SharedWeights(Outer(**about[0]["outer"]), exact, trained, about[0]["era"])
    rest = {k: t for k, t in tensors.items() if not k.startswith("exact/")}
    found.restore(fragments, max(each["step"] for each in about), rest)
    return found


def _look(boxes: Sequence[tuple[Box, Tensor]], means: Mapping[str, Tensor]) -> Movement:
    norm = math.hypot(*(float(values.norm()) for _, values in boxes))
    mean = math.hypot(*(float(value.norm()) for value in means.values()))
    product = sum(float((values * narrowed(means[box.name], box)).sum()) for box, values in boxes)
    # Cosine; a movement of length 0 has none.
    return Movement(norm, product / (norm * mean) if norm and mean else 0.0)


def _file(folder: Path, number: int, count: int) -> Path:
    return folder / f"fragment-{number}-of-{count}.safetensors"


def balance(sizes: Mapping[str, int], count: int) -> list[list[str]]:
    """Divide parameters into parts with about as many entries each, everywhere alike.

    Args:
        sizes: Name -> entries.
        count: Of parts.
    """
    parts: list[list[str]] = [[] for _ in range(count)]
    load = [0] * count
    # The largest first, each to the lightest part; ties by name, to be the same everywhere.
    for name in sorted(sizes, key=lambda n: (-sizes[n], n)):
        lightest = load.index(min(load))
        parts[lightest].append(name)
        load[lightest] += sizes[name]
    return parts
