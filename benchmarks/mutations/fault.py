"""What a planted fault is, and how it is switched on."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

__all__ = ["FAULTS", "Fault", "Switch", "fault"]

STEP = 5
"""First step of a fault that begins later. The steps 0, 8 and 16 are proved."""
PROVED = 8
"""Step of a fault that happens once."""


class Switch(Callback):
    """Says whether the fault acts now, and puts it in the place of the healthy code.

    Args:
        when: "always"; "later": from step 5 on; "once": one time in step 8, which is proved;
            "between": one time in step 5, which is not; "accumulating": in all batches of a step
            but its last one.
        rank: The only rank on which it acts; None: on all.
    """

    def __init__(self, when: str, rank: int | None) -> None:
        self._when, self._rank = when, rank
        self._step, self._is_last, self._done = 0, True, False
        self._actions: list[Callable[[Any, Any], None]] = []
        self._first: list[Callable[[Any, Any], None]] = []

    def acts(self) -> bool:
        """Tell whether the fault is to happen; one that happens once has happened then."""
        if not dist.is_initialized():
            return False  # in the step that is proved on one process
        if self._rank is not None and dist.get_rank() != self._rank:
            return False
        if self._when in ("once", "between"):
            chosen = self._step == (PROVED if self._when == "once" else STEP)
            acts, self._done = chosen and not self._done, self._done or chosen
            return acts
        if self._when == "accumulating":
            return not self._is_last
        return self._when == "always" or self._step >= STEP

    def swap(self, healthy: Any, make: Callable[[Any], Callable[..., Any]]) -> None:
        """Put a faulty function in the place of a function of the package, wherever it is named.

        Args:
            healthy: The function; or a class and the name of a method of it.
            make: Returns the faulty function, given the healthy one.
        """
        if isinstance(healthy, tuple):
            owner, name = healthy
            kept = vars(owner)[name]
            static = isinstance(kept, staticmethod)
            plain = kept.__func__ if static else kept
            chosen = self._choose(plain, make(plain))
            setattr(owner, name, staticmethod(chosen) if static else chosen)
            return
        chosen = self._choose(healthy, make(healthy))
        for module in [m for n, m in sys.modules.items() if n.split(".")[0] in _SWAPPED]:
            for name, value in list(vars(module).items()):
                if value is healthy:
                    setattr(module, name, chosen)

    def _choose(self, healthy: Any, faulty: Any) -> Callable[..., Any]:
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (faulty if self.acts() else healthy)(*args, **kwargs)

        return chosen

    def after_batch(self, action: Callable[[Any, Any], None]) -> None:
        """Call a function with Trainer and module at the end of the batches in which it acts."""
        self._actions.append(action)

    def at_start(self, action: Callable[[Any, Any], None]) -> None:
        """Call a function with Trainer and module before the first batch."""
        self._first.append(action)

    @override
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for action in self._first:
            action(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self._step = trainer.global_step
        self._is_last = not trainer.fit_loop._should_accumulate()

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if self._actions and self.acts():
            for action in self._actions:
                action(trainer, pl_module)


_SWAPPED = ("lightning_par", "torch")


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault.

    Attributes:
        story: What is wrong, in a few words.
        install: Puts it into a process.
        layout: Options of the strategy.
        kind: What causes such a thing: "software", "machine" or "data".
        when: See `Switch`.
        rank: Likewise.
        world: Number of ranks.
        accumulate: Batches of a step.
        overrides: Fields of the model's configuration.
        experts: Whether the model is the mixture of experts.
        trainer: Further options of the Trainer.
    """

    story: str
    install: Callable[[Switch], None]
    layout: Mapping[str, Any]
    kind: str = "software"
    when: str = "always"
    rank: int | None = None
    world: int = 2
    accumulate: int = 1
    overrides: Mapping[str, Any] = field(default_factory=dict)
    experts: bool = False
    trainer: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Layout, story and when it acts."""
        sizes = {n: v for n, v in self.layout.items() if v != 1 or "stage" in n}
        short = " ".join(f"{_SHORT.get(n, n)} {v}".strip() for n, v in sizes.items())
        where = "" if self.rank is None else f", rank {self.rank}"
        return f"{short}: {self.story} ({self.when}{where})"


_SHORT = {
    "tensor_parallel_size": "tp",
    "pipeline_parallel_size": "pp",
    "context_parallel_size": "cp",
    "expert_parallel_size": "ep",
    "zero_stage": "ZeRO",
    "sequence_parallel": "sequence",
    "offload_options": "offload",
}

FAULTS: list[Fault] = []
"""All of them, in the order of their files."""


def fault(
    story: str, layout: Mapping[str, Any], *variants: Mapping[str, Any], **options: Any
) -> Callable[[Callable[[Switch], None]], Callable[[Switch], None]]:
    """Add a function that installs a fault to the list, once for each variant.

    Args:
        story: What is wrong, in a few words.
        layout: Options of the strategy.
        variants: Further options of `Fault`, of one more row each; none: one row.
        options: Options of `Fault` of all rows.
    """

    def add(install: Callable[[Switch], None]) -> Callable[[Switch], None]:
        for variant in variants or ({},):
            given: Any = {"layout": layout, **options, **variant}
            FAULTS.append(Fault(story=story, install=install, **given))
        return install

    return add
