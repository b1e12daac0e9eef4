"""Options of islands, checked before anything is built."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args, Literal

from lightning_par.engine.option_fields import read_fields
from lightning_par.errors import ConfigurationError, either, raise_problems
from lightning_par.sizes import is_count

__all__ = ["Outer", "read_outer"]

OuterOptimizer = Literal["nesterov", "average", "sgd"]
Quantization = Literal["none", "bf16", "int8", "int4"]
_OF_A_PROCESS = ("server", "island", "islands", "key_file", "ca_file", "timeout", "keep")
"""Fields that may differ between the islands of one run."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    """When islands exchange how far their weights moved, in which form, and what is made of it.

    `min_islands=1, grace=0` is the asynchronous parameter server, ``grace=inf`` DiLoCo in lock
    step.

    Attributes:
        every: Optimizer steps between two exchanges of the same fragment (H).
        fragments: Parts of the model, each exchanged at its own step of the `every`.
        overlap: Optimizer steps that go on while a fragment is on its way.
        optimizer: What the server does with the mean movement: ``"nesterov"`` and ``"sgd"`` are
            `torch.optim.SGD` with `lr` and `momentum`; ``"average"`` takes the mean as it is. Where
            islands are missing in a round, ``"sgd"`` alone makes a whole step.
        lr: Rate of the outer optimizer; None: 0.7 for ``"nesterov"``, else 1.
        momentum: Of the outer optimizer; None: 0.9 for ``"nesterov"``, else 0.
        quantize: Form of movements and updates on the wire: ``"none"`` (float32, or float64 of
            such weights), ``"bf16"``, or ``"int8"`` and ``"int4"`` with a scale for every 256.
        min_islands: Contributions without which nothing is merged.
        grace: Seconds that live islands are waited for once the first contribution has come.
        adapt: Let an island that is slower than the fastest make fewer steps between two exchanges,
            so that they come at the same time.
        server: ``"host:port"`` of ``lightning-par serve``, or of several with commas between, which
            hold a part of the parameters each; None: LIGHTNING_PAR_SERVER says it.
        island: Number of this island, from 0; None: LIGHTNING_PAR_ISLAND says ``"island/islands"``.
        islands: Number of islands among which the samples are divided.
        key_file: File that holds the shared key; None: LIGHTNING_PAR_KEY holds it.
        ca_file: Certificates (PEM) that a server with TLS is checked against; None: no TLS.
        timeout: Seconds after which an island that does not reach the server gives up.
        keep: Folder of this machine in which every rank keeps the states of its optimizers at each
            exchange, for when its island comes back; None: they begin anew then.

    Raises:
        ConfigurationError: With every value that is not possible.

    Examples:
        >>> outer = Outer(every=100, server="10.0.0.1:29600", island=0, islands=4)
    """

    every: int = 50
    fragments: int = 1
    overlap: int = 0
    optimizer: OuterOptimizer = "nesterov"
    lr: float | None = None
    momentum: float | None = None
    quantize: Quantization = "int8"
    min_islands: int = 1
    grace: float = math.inf
    adapt: bool = False
    server: str | None = None
    island: int | None = None
    islands: int | None = None
    key_file: str | None = None
    ca_file: str | None = None
    timeout: float = 600.0
    keep: str | None = None

    def __post_init__(self) -> None:
        problems = []
        for name, least in (("every", 1), ("fragments", 1), ("overlap", 0), ("min_islands", 1)):
            if not is_count(getattr(self, name), least):
                problems.append(
                    f"{name}={getattr(self, name)!r} must be a whole number of {least} or more."
                )
        for name, valid in (("optimizer", OuterOptimizer), ("quantize", Quantization)):
            if getattr(self, name) not in get_args(valid):
                names = either([repr(v) for v in get_args(valid)])
                problems.append(f"{name}={getattr(self, name)!r} must be {names}.")
        if not isinstance(self.adapt, bool):
            problems.append(f"adapt={self.adapt!r} must be True or False.")
        problems += self._number_problems()
        # Places are compared by values that have to be numbers.
        if not problems:
            problems += self._place_problems()
        raise_problems(ConfigurationError, "LP902", problems)
        nesterov = self.optimizer == "nesterov"
        for name, value in (("lr", 0.7 if nesterov else 1.0), ("momentum", 0.9 * nesterov)):
            if getattr(self, name) is None:  # how a frozen dataclass sets its own fields
                object.__setattr__(self, name, value)

    def _number_problems(self) -> list[str]:
        problems = []
        if self.lr is not None and not (_is_number(self.lr) and 0 < self.lr < math.inf):
            problems.append(f"lr={self.lr!r} must be a number of more than 0.")
        if self.momentum is not None and not (_is_number(self.momentum) and 0 <= self.momentum < 1):
            problems.append(f"momentum={self.momentum!r} must be at least 0 and less than 1.")
        for name in ("grace", "timeout"):
            value = getattr(self, name)
            if not _is_number(value) or not value >= 0:
                problems.append(f"{name}={value!r} must be a number of seconds, 0 or more.")
        if self.optimizer == "average" and (self.lr or 1, self.momentum or 0) != (1, 0):
            problems.append(
                f"optimizer='average' uses the mean of the islands' weights, so lr={self.lr} and "
                f"momentum={self.momentum} have no effect. Leave them out, or use optimizer='sgd' "
                "or 'nesterov'."
            )
        if self.optimizer == "nesterov" and self.momentum == 0:
            problems.append(
                "optimizer='nesterov' needs a momentum of more than 0. Set momentum=, or use "
                "optimizer='sgd'."
            )
        return problems

    def _place_problems(self) -> list[str]:
        problems = []
        # A fragment leaves every `every / fragments` steps and may be away for `overlap` of them.
        if self.overlap * self.fragments >= max(self.every, self.fragments):
            problems.append(
                f"overlap={self.overlap} is too large for every={self.every} and "
                f"fragments={self.fragments}: a fragment is sent every "
                f"{self.every / self.fragments:g} steps, and its result has to arrive before the "
                f"next fragment is sent. Use overlap={max(0, (self.every - 1) // self.fragments)} "
                "or less."
            )
        if self.fragments > self.every:
            problems.append(
                f"fragments={self.fragments} is more than every={self.every}, but each fragment "
                f"is sent after a different step. Use fragments={self.every} or less."
            )
        if (self.island is None) != (self.islands is None):
            problems.append(
                "island= and islands= must be passed together, as in island=0, islands=4."
            )
        elif self.island is not None and not (
            is_count(self.island, 0) and is_count(self.islands, self.island + 1)
        ):
            problems.append(
                f"island={self.island!r} with islands={self.islands!r}: islands= must be a number, "
                "and island= a number from 0 to islands - 1."
            )
        return problems

    def agreement(self) -> dict[str, Any]:
        """Return the fields on which the server and all islands have to agree."""
        return {n: v for n, v in asdict(self).items() if n not in _OF_A_PROCESS}


def read_outer(chosen: Outer | Mapping[str, Any] | None) -> Outer | None:
    """Return the options, also of a dict of their fields; None: there are no islands.

    Raises:
        ConfigurationError: There is no such field or value.
    """
    if chosen is None or isinstance(chosen, Outer):
        return chosen
    return read_fields(Outer, chosen, "outer")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
