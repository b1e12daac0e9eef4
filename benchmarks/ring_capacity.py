"""How long a sequence, and how large a batch, BERT-base trains with under a cap of memory per
device: tensor parallelism beside divided sequences, in the manner of Li et al. (2105.13120).

Nothing is timed. The bytes that are alive at the peak of a step are counted at every operation, on
the rank that has most, at three numbers of samples; the first and the last give the line that is
extended to the cap, and the middle one says how straight it is. They are large enough for the peak
to be where activations are, not where all gradients are. Half as many samples of twice the length
say that only their product counts. Weights and AdamW's two moments are added by their number: 12
bytes for each parameter of the rank, in float32.

All layers are alike: models of `--layers` are counted, two of them, and the line through them is
extended to 12, so that eight ranks fit a small machine. `--layers 12` counts the whole.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from _paired import Arguments, launch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from lightning_par import Hybrid3DStrategy
from lightning_par.models import BertModule
from lightning_par.observe.live_bytes import LiveBytes

GIB = 2**30
LENGTH, SAMPLES = 256, (3, 4, 5)
"""T, and B; under a ring, B for each rank."""
BATCH_LENGTH = 512
"""T of the largest batch."""
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("tensor_parallel_size", {"sequence_parallel": False}),
    "tensor, sequence": ("tensor_parallel_size", {}),
    "ring": ("context_parallel_size", {"context_options": {"layout": "contiguous"}}),
}
HEADS = LAYERS = 12


class Samples(Dataset[dict[str, Tensor]]):
    """Random tokens without padding."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(index)
        ids = torch.randint(1000, 30_000, (self.length,), generator=draw)
        whole = torch.ones(self.length, dtype=torch.int64)
        return {
            "input_ids": ids,
            "segment_ids": 0 * whole,
            "attention_mask": whole,
            "maskable": whole.bool(),
            "sentence_order": torch.tensor(0),
        }


class PlainBert(BertModule):
    """Without states of an optimizer, which are added by their number."""

    def configure_optimizers(self) -> Any:
        """Return plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Count(Callback):
    """Counts a step from its forward to before the optimizer."""

    def __init__(self) -> None:
        self.live = LiveBytes()
        self.held = 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, *_: Any) -> None:
        """Begin to count."""
        local = [getattr(p, "to_local", lambda p=p: p)() for p in pl_module.parameters()]
        self.held = 12 * sum(p.numel() for p in local)
        self.live = LiveBytes(besides=[local, *pl_module.buffers(), batch])
        self.live.__enter__()

    def on_before_optimizer_step(self, *_: Any) -> None:
        """End it."""
        self.live.__exit__(None, None, None)


def peak(way: str, layers: int, batch: int, length: int) -> tuple[int, int]:
    """Return the bytes held all along and those at the peak of a step, of the rank with most."""
    size, options = WAYS[way]
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    count = Count()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=Hybrid3DStrategy(**{**sizes, **options, size: dist.get_world_size()}),
        max_steps=1,
        limit_val_batches=0,
        callbacks=[count],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    overrides = {"order_head": False, "dropout": 0.0, "max_length": 2 * LENGTH}
    overrides["num_layers"] = layers
    module = PlainBert(preset="base", overrides=overrides)
    trainer.fit(module, DataLoader(Samples(length), batch_size=batch))
    most = torch.tensor([count.held, count.live.peak])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    held, live = most.tolist()
    return held, live


@dataclass(frozen=True)
class Line:
    """Bytes of the fullest rank, over the number of tokens; how far other points are from it.

    Attributes:
        held: All along.
        base: At the peak of a step, without a token.
        slope: For each token of the whole batch.
        bent: The middle point over the line, less 1.
        long: Twice the length and half of the samples over the middle point, less 1.
    """

    held: float
    base: float
    slope: float
    bent: float
    long: float

    def beyond(self, other: "Line", factor: float) -> "Line":
        """Return what comes after `self` and `other`, `factor` times their distance from `self`."""
        ahead = [
            one + factor * (two - one)
            for one, two in zip(
                (self.held, self.base, self.slope),
                (other.held, other.base, other.slope),
                strict=True,
            )
        ]
        return Line(
            *ahead, max(self.bent, other.bent, key=abs), max(self.long, other.long, key=abs)
        )


def count_line(way: str, layers: int) -> Line:
    """Return the line of a model with so many layers; every rank has to call."""
    scale = dist.get_world_size() if way == "ring" else 1
    batches = [samples * scale for samples in SAMPLES]
    (held, low), (_, middle), (_, high) = [peak(way, layers, batch, LENGTH) for batch in batches]
    _, other = peak(way, layers, batches[1] // 2, 2 * LENGTH)
    tokens = [LENGTH * batch for batch in batches]
    slope = (high - low) / (tokens[2] - tokens[0])
    base = low - slope * tokens[0]
    return Line(held, base, slope, middle / (base + slope * tokens[1]) - 1, other / middle - 1)


@dataclass(frozen=True)
class Cap:
    """What fits.

    Attributes:
        cap: Bytes of a device.
        layers: Of the models that are counted.
    """

    cap: int
    layers: Sequence[int]

    def body(self, arguments: Arguments) -> None:
        """Print a row for each way that these ranks can go."""
        world = dist.get_world_size()
        for way in WAYS:
            if world == 1 and way != "tensor":
                continue
            if HEADS % world and way != "ring":
                if dist.get_rank() == 0:
                    print(f"{world:5}  {way:17}  refused: {HEADS} heads")
                continue
            lines = [count_line(way, layers) for layers in self.layers]
            found = lines[0]
            if len(lines) == 2:
                first, second = self.layers
                found = lines[0].beyond(lines[1], (LAYERS - first) / (second - first))
            fits = int((self.cap - found.held - found.base) / found.slope)
            if dist.get_rank() == 0:
                print(
                    f"{world:5}  {way:17}  {found.held / GIB:8.2f}  {found.base / GIB:8.2f}"
                    f"  {found.slope / 1024:9.1f}  {fits:9}  {fits // BATCH_LENGTH:7}"
                    f"  {100 * found.bent:+6.2f} %  {100 * found.long:+6.2f} %",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=16, help="of a device")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4], help="12, or two numbers")
    chosen = parser.parse_args()
    print("'bent': the middle point beside the line; 'long': twice the length, half the samples")
    print("ranks  way                held GiB  rest GiB   KiB/token", end="")
    print("  longest T  B, 512      bent      long")
    arguments = Arguments(pairs=1, steps=1, warmup=0, profile=False)
    for ranks in chosen.ranks:
        launch(Cap(int(chosen.gib * GIB), chosen.layers).body, arguments, ranks=ranks)


if __name__ == "__main__":
    main()
