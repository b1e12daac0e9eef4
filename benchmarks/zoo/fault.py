"""What a fault of the zoo is, and how it is planted in a trainer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.zoo.comm import Layout
from benchmarks.zoo.trainer import Trainer

__all__ = ["BEGINS", "FAULTS", "PHASES", "STEPS", "Fault", "Plant", "fault"]

PHASES = ("start", "forward", "backward", "clip", "update", "evaluation")
"""Parts of a run: the weights with which it begins or goes on; batch, activations and loss;
gradients and their sums; hooks and clipping; optimizer and shards; evaluation."""

STEPS = 10
"""Steps of a run, numbered from 0."""
BEGINS = {
    "first": 0,
    "rare": 1,
    "once": 2,
    "later": 3,
    "epoch": 5,
    "resume": 5,
    "evaluation": 0,
}
"""When a fault acts: from step 0 on; where a sample has what is rare, first in step 1; in step 2
alone; from step 3 on; in step 5 alone, the first one of the second epoch; when the run goes on from
a checkpoint before step 5; when it evaluates, before step 0."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault.

    Attributes:
        name: In a few words, with hyphens.
        story: What is wrong, and what comes of it.
        source: Where it was seen: repository and number of an issue or pull request, paper and
            row, or "own".
        axis: What has to be on for it: axes of `Layout`, joined by " x " where it takes several.
        phase: One of `PHASES`.
        plant: Swaps methods of a trainer.
        layout: Of the run.
        options: Further options of the model's configuration.
        when: One of `BEGINS`.
        is_shared: Whether it is in code that one process runs, too, so that it does not differ.
    """

    name: str
    story: str
    source: str
    axis: str
    phase: str
    plant: Callable[["Plant"], None]
    layout: Layout
    options: Mapping[str, Any] = field(default_factory=dict)
    when: str = "first"
    is_shared: bool = False

    def plant_in(self, trainer: Trainer) -> Trainer:
        """Plant it in a trainer; return the trainer."""
        self.plant(Plant(trainer, self.when))
        return trainer

    @property
    def begins(self) -> int:
        """Step with which it begins."""
        return BEGINS[self.when]


@dataclass(frozen=True)
class Plant:
    """Puts faulty code in the place of healthy methods of one trainer.

    Attributes:
        trainer: It.
        when: When the faulty code is called, see `BEGINS`; else the healthy one is.
    """

    trainer: Trainer
    when: str

    def acts(self) -> bool:
        """Tell whether the fault acts in this step."""
        step = self.trainer.step
        begins = BEGINS[self.when]
        return step == begins if self.when in ("once", "epoch") else step >= begins

    def swap(self, owner: Any, name: str, make: Callable[..., Callable[..., Any]]) -> None:
        """Swap a method of an object of the trainer.

        Args:
            owner: The object; or a class: all parts of the model that are of it.
            name: Of the method.
            make: Returns the faulty function, given the healthy one and, for a class, the object.
        """
        if isinstance(owner, type):
            for part in self.trainer.model.modules():
                if isinstance(part, owner):
                    self.swap(part, name, lambda healthy, part=part: make(healthy, part))
            return
        healthy = getattr(owner, name)
        faulty = make(healthy)

        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (faulty if self.acts() else healthy)(*args, **kwargs)

        object.__setattr__(owner, name, chosen)


FAULTS: list[Fault] = []
"""All of them, in the order of their files."""


def fault(
    name: str, story: str, source: str, axis: str, phase: str, layout: Layout, **options: Any
) -> Callable[[Callable[[Plant], None]], Callable[[Plant], None]]:
    """Add the function below to the zoo.

    Args:
        name: See `Fault`, as all others.
        story: Two lines at most.
        source: "own" if nobody has told of it in public.
        axis: What has to be on.
        phase: Part of the run.
        layout: Of the run.
        options: `when`, `is_shared`, and fields of the model's configuration.
    """

    def add(plant: Callable[[Plant], None]) -> Callable[[Plant], None]:
        when, is_shared = options.pop("when", "first"), options.pop("is_shared", False)
        found = Fault(
            name=name,
            story=story,
            source=source,
            axis=axis,
            phase=phase,
            plant=plant,
            layout=layout,
            options=options,
            when=when,
            is_shared=is_shared,
        )
        FAULTS.append(found)
        return plant

    return add
