"""What a run found out by itself, and where from: one line of its log.

Whatever the user did not declare and the run has to know (the rule of the loss, the batch dim, the
order of the samples) is decided in some place. That place adds a line here, so that nothing is
assumed without being said.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lightning.pytorch.utilities import rank_zero_info

__all__ = ["Decision", "Decisions"]


@dataclass(frozen=True)
class Decision:
    """One thing that a run decided.

    Attributes:
        name: What was decided: "loss".
        value: The outcome: "the mean over the samples".
        source: Where it comes from: "found in the first step"; empty if the value says it.
    """

    name: str
    value: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.value}" + (f", {self.source}" if self.source else "")


class Decisions:
    """The decisions of a run, by name; the strategy owns them.

    Each rank may add them; only rank 0 logs.
    """

    def __init__(self) -> None:
        self._held: dict[str, Decision] = {}
        self._logged: set[Decision] = set()

    def __iter__(self) -> Iterator[Decision]:
        return iter(self._held.values())

    def __str__(self) -> str:
        return "; ".join(map(str, self._held.values()))

    def add(self, name: str, value: str, source: str = "") -> None:
        """Note a decision; one of the same name is replaced.

        Args:
            name: What was decided.
            value: The outcome.
            source: Where it comes from.
        """
        self._held[name] = Decision(name, value, source)

    def log(self) -> None:
        """Log in one line the decisions that were not logged yet, on rank 0."""
        new = [made for made in self._held.values() if made not in self._logged]
        if new:
            self._logged.update(new)
            rank_zero_info("Decided for this run: %s.", "; ".join(map(str, new)))
