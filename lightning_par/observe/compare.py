"""Comparison of what two runs computed in a step: a mesh and one process.

Note [Tolerance]: two layouts add the same numbers in another order. What that changes is a few
roundings, relative to the norm of a gradient; where the sum itself is next to nothing (the bias of
a key in attention has no gradient at all), relative to the norm of all gradients. In float64 much
of a model may still compute in float32 (norms, softmax, the loss), hence its tolerance. The update
is compared with that of the same gradients, so that it differs by the roundings of a norm at most.
Where all of a model computes in float64, sums in another order differ by about 1e-15 per step: two
such runs are compared by their largest entries, and their weights as they are.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_par.observe.report import StepRecord

__all__ = [
    "EXACT",
    "Difference",
    "GradientDifferences",
    "Tolerance",
    "first_beyond",
    "measure_backwards",
    "measure_handed",
    "measure_states",
    "measure_values",
    "tolerance_of",
]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What a difference may be; see Note [Tolerance].

    Attributes:
        loss: Relative to the loss, or to 1 if that is more.
        gradient: Norm of the difference, relative to the norm of the gradient.
        nothing: Norm of the difference, relative to the norm of all gradients.
        update: Norm of the difference of a weight, relative to the norm of its update.
        rounding: Norm of the difference of a weight, relative to the norm of the weight.
        handed: Norm of the difference of a gradient after hooks and clipping, relative to the norm.
        factor: Norm of what no factor explains, relative to the norm.
        least: What the norm of a tensor counts as if it is smaller.
        order: Order of the norms; infinity gives the largest entry.
        finite: Whether a value that is not finite differs from every other, also from an equal one.
    """

    loss: float
    gradient: float
    nothing: float
    update: float
    rounding: float
    handed: float
    factor: float = 1e-3
    least: float = 0.0
    order: float = 2.0
    finite: bool = False

    def norm(self, tensor: Tensor) -> float:
        """Return the norm of a tensor."""
        wide = _wide(tensor)
        return float(torch.linalg.vector_norm(wide, self.order)) if wide.numel() else 0.0

    def distance(self, got: Tensor, wanted: Tensor) -> float:
        """Return the norm of the difference of two tensors.

        Entries that are finite on neither side count as equal, unless all have to be finite. The
        others then differ by more than roundings, which gives infinity, or not at all.
        """
        # NaN counts as infinite, so that one that both runs have differs, too.
        if self.finite:
            return self.norm((_wide(got) - _wide(wanted)).nan_to_num(math.inf))
        # Equal infinities would give inf - inf = NaN below.
        if torch.equal(got, wanted):
            return 0.0
        got, wanted = _wide(got), _wide(wanted)
        size, finite = self.norm(got - wanted), wanted.isfinite()
        # Both broke at the same entries: that is the model's doing, not the layout's.
        if size == size or not torch.equal(got.isfinite(), finite):
            return size
        rest, norm = self.norm(got[finite] - wanted[finite]), self.norm(wanted[finite])
        # The caller's bound is made of a norm that is not finite, and says nothing.
        return math.inf if rest > self.gradient * norm + self.nothing else 0.0


_TOLERANCES = {
    torch.float64: Tolerance(
        loss=5e-7, gradient=2e-6, nothing=2e-8, update=1e-6, rounding=1e-11, handed=1e-9
    ),
    torch.float32: Tolerance(
        loss=2e-5, gradient=2e-3, nothing=2e-5, update=2e-3, rounding=1e-6, handed=1e-4
    ),
    torch.bfloat16: Tolerance(
        loss=2e-2, gradient=0.1, nothing=3e-2, update=2e-2, rounding=1e-2, handed=2e-2
    ),
    torch.float16: Tolerance(
        loss=5e-3, gradient=5e-2, nothing=1e-2, update=2e-2, rounding=2e-3, handed=5e-3
    ),
}
EXACT = Tolerance(
    **dict.fromkeys(("loss", "gradient", "rounding", "handed", "factor"), 1e-9),
    nothing=0.0,
    update=0.0,
    least=1.0,
    order=math.inf,
    finite=True,
)
"""Tolerance of runs that compute in float64 throughout."""


def tolerance_of(*dtypes: torch.dtype) -> Tolerance:
    """Return the tolerance of the least exact of some dtypes.

    Args:
        dtypes: Of weights, of what is computed, and of what is sent.
    """
    # By the loss, which orders the dtypes as every other field does.
    return max((_TOLERANCES[d] for d in dtypes if d in _TOLERANCES), key=lambda t: t.loss)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What differs most.

    Attributes:
        kind: What it is; "closure": how often the optimizer computed the loss; "handed": a gradient
            after hooks and clipping; "start": a weight before the step.
        name: FQN of the parameter, buffer or metric, or logged name; empty for a loss.
        got: The loss, or the norm, on the mesh.
        wanted: That on one process.
        size: Norm of the difference.
        excess: How many times what it may be it is.
        others: How many others of the same kind differ, too.
        factor: c, if what the mesh has is c times what one process has.
        step: Step, counted from 0, where several were compared on every rank.
        rank: Global rank then.
    """

    kind: Literal[
        "start", "loss", "closure", "gradient", "handed", "weight", "log", "metric", "output"
    ]
    name: str = ""
    got: float
    wanted: float
    size: float
    excess: float = math.inf
    others: int = 0
    factor: float | None = None
    step: int | None = None
    rank: int | None = None

    @property
    def scale(self) -> float:
        """The absolute loss, or the norm, on one process."""
        return abs(self.wanted)

    @property
    def _apart(self) -> str:
        # Norms that print alike tell nothing: then the difference is named as well.
        same = math.isclose(self.got, self.wanted, rel_tol=1e-6)
        return f"; the norm of the difference is {self.size:.3g}" if same else ""

    def __str__(self) -> str:
        if self.step is not None:
            of = f" of {self.name}" if self.name else ""
            return (
                f"the {self.kind}{of} at step {self.step} differs on rank {self.rank} by "
                f"{self.size:.3g} (largest value {self.scale:.3g})"
            )
        if self.kind == "loss":
            return (
                f"the loss of the global batch is {self.got:.9g}, on one process {self.wanted:.9g}"
            )
        if self.kind in _OF_EVALUATION:
            what = _OF_EVALUATION[self.kind].format(self.name)
            return f"{what} {self.got:.9g}, on one process {self.wanted:.9g}{self._apart}"
        if self.kind == "closure":
            return f"the loss was computed {self.got:g} times, on one process {self.wanted:g} times"
        kind, ending = _OF_PARAMETER[self.kind]
        what = f"the {kind} of {self.name}{ending}"
        more = f" ({self.others} more differ)" if self.others else ""
        return (
            f"{what} has the norm {self.got:.6g}, on one process {self.wanted:.6g}; the norm of "
            f"the difference is {self.size:.3g}{more}"
        )


_OF_PARAMETER = {
    "start": ("weight", " before the step"),
    "gradient": ("gradient", ""),
    "handed": ("gradient", ", as the optimizer gets it,"),
    "weight": ("weight", " after the step"),
}
_OF_EVALUATION = {
    "log": "the logged {!r} is",
    "metric": "the metric {!r} has for this batch the norm",
    "output": "what the step returns has the norm",
}


def measure_values(
    kind: Literal["log", "metric", "output"],
    name: str,
    got: Sequence[Any],
    wanted: Sequence[Any],
    tolerance: Tolerance,
) -> Iterator[Difference]:
    """Give the differences of the numbers and tensors of an evaluation step.

    Args:
        kind: What they are.
        name: Of the log or metric.
        got: Those of the mesh.
        wanted: Those of one process; what is neither number nor tensor is left out.
        tolerance: For both; of a single number that of a loss, else that of a gradient.
    """
    # The caller has compared how many there are.
    for mesh, one in zip(got, wanted, strict=True):
        if not all(isinstance(each, int | float | Tensor) for each in (mesh, one)):
            continue
        value, other = torch.as_tensor(mesh).detach(), torch.as_tensor(one).detach()
        # No difference can be taken; infinity is beyond every bound.
        if value.shape != other.shape:
            norms = tolerance.norm(value), tolerance.norm(other)
            yield Difference(kind=kind, name=name, got=norms[0], wanted=norms[1], size=math.inf)
            continue
        size, norm = tolerance.distance(_wide(value), _wide(other)), tolerance.norm(other)
        # A logged number is a mean like the loss, relative to 1 where it is small.
        is_number = other.numel() == 1
        bound = tolerance.loss * max(1.0, norm) if is_number else tolerance.gradient * norm
        shown = (value, other) if is_number and not other.is_complex() else None
        yield Difference(
            kind=kind,
            name=name,
            got=tolerance.norm(value) if shown is None else float(value),
            wanted=norm if shown is None else float(other),
            size=size,
            # Plus something absolute, since an output may be all zeros.
            excess=_excess(size, bound + tolerance.nothing),
        )


def first_beyond(found: Iterable[Difference]) -> Difference | None:
    """Return the first difference that is more than it may be, None if there is none."""
    return next((difference for difference in found if difference.excess > 1), None)


def measure_backwards(
    mesh: StepRecord, one: StepRecord, tolerance: Tolerance
) -> Iterator[Difference]:
    """Give the differences of losses, then the largest among the gradients of every backward, and
    that of the number of backwards, if there is one.

    Args:
        mesh: What the mesh computed; gradients that are None are not compared.
        one: What one process computed, with as many backwards.
        tolerance: For both.
    """
    # Not strict: how many there are is a difference of its own, given last.
    for got, wanted in zip(mesh.losses, one.losses, strict=False):
        # Two NaN are alike where the mesh is not asked to be finite.
        alike = not tolerance.finite and (got == wanted or (got != got and wanted != wanted))
        size = 0.0 if alike else abs(got - wanted)
        excess = _excess(size, tolerance.loss * max(1.0, abs(wanted)))
        yield Difference(kind="loss", got=got, wanted=wanted, size=size, excess=excess)
    for gradients, others in zip(mesh.gradients, one.gradients, strict=False):
        if gradients is None or others is None:
            continue
        yield from _measure_gradients("gradient", gradients, others, tolerance)
    backwards, wanted = float(len(mesh.losses)), float(len(one.losses))
    if backwards != wanted:
        size = backwards - wanted
        yield Difference(kind="closure", got=backwards, wanted=wanted, size=size, excess=math.inf)


def measure_handed(mesh: StepRecord, one: StepRecord, tolerance: Tolerance) -> Iterator[Difference]:
    """Give the largest difference among the gradients that each step of an optimizer was handed.

    Args:
        mesh: What the mesh computed.
        one: What one process computed from the same gradients of backwards.
        tolerance: Of the update.
    """
    # Otherwise a step was skipped (a scaler, a closure), of which the weights tell more.
    if len(mesh.handed) == len(one.handed):
        for got, wanted in zip(mesh.handed, one.handed, strict=True):
            # Clipping is one factor for all: its own rounding is all that may differ.
            near = replace(tolerance, gradient=tolerance.handed, nothing=tolerance.rounding)
            yield from _measure_gradients("handed", got, wanted, near)


def _measure_gradients(
    kind: Literal["gradient", "handed"],
    got: Mapping[str, Tensor],
    wanted: Mapping[str, Tensor],
    tolerance: Tolerance,
) -> Iterator[Difference]:
    differences = GradientDifferences(kind, tolerance)
    for name in sorted({*got, *wanted}):
        differences.add(name, got.get(name), wanted.get(name))
    yield from differences.largest()


class GradientDifferences:
    """Differences of gradients that are measured one by one, so that none has to be kept.

    Args:
        kind: See `Difference`.
        tolerance: For both sides.

    Attributes:
        norm: Of all gradients of one process, together.
    """

    def __init__(self, kind: Literal["gradient", "handed"], tolerance: Tolerance) -> None:
        self._kind, self._tolerance = kind, tolerance
        self._pairs = dict[str, _Pair]()
        self.norm = 0.0

    def __contains__(self, name: str) -> bool:
        return name in self._pairs

    def add(self, name: str, got: Tensor | None, wanted: Tensor | None) -> None:
        """Measure a gradient.

        Args:
            name: FQN of the parameter.
            got: That of the mesh; None counts as zeros.
            wanted: That of one process, likewise; on the same device.
        """
        if got is None and wanted is None:
            return
        got = torch.zeros_like(wanted) if got is None else got  # type: ignore[arg-type]
        wanted = torch.zeros_like(got) if wanted is None else wanted
        tolerance = self._tolerance
        pair = _Pair.of(name, got, wanted, tolerance)
        bound = tolerance.gradient * max(tolerance.least, pair.wanted)
        # What is within the bound of its own is no candidate.
        factor = _factor(_wide(got), _wide(wanted), tolerance) if pair.size > bound else None
        self._pairs[name] = replace(pair, bound=bound, factor=factor)
        self.norm = math.hypot(self.norm, pair.wanted)

    def largest(self) -> Iterator[Difference]:
        """Give the difference that is furthest beyond what it may be, if there is a gradient."""
        whole = self._tolerance.nothing and self._tolerance.nothing * self.norm
        pairs = [replace(pair, bound=pair.bound + whole) for pair in self._pairs.values()]
        return _largest(self._kind, pairs)


@dataclass(frozen=True, kw_only=True)
class _Pair:
    """A tensor of the mesh and that of one process: norms, that of the difference, and what it may
    be; `factor` as in `Difference`.
    """

    name: str
    got: float
    wanted: float
    size: float
    bound: float = 0.0
    factor: float | None = None

    @classmethod
    def of(cls, name: str, got: Tensor, wanted: Tensor, tolerance: Tolerance) -> "_Pair":
        norms = tolerance.norm(got), tolerance.norm(wanted)
        size = tolerance.distance(got, wanted)
        return cls(name=name, got=norms[0], wanted=norms[1], size=size)


def measure_states(
    before: Mapping[str, Tensor],
    mesh: Mapping[str, Tensor],
    one: Mapping[str, Tensor],
    tolerance: Tolerance,
) -> Iterator[Difference]:
    """Give the largest difference of weights and buffers after the step, if there are some.

    Args:
        before: Name -> value before the step.
        mesh: Name -> value after it on the mesh.
        one: Name -> value after it on one process, from the same gradients.
        tolerance: Of the update.
    """
    pairs = []
    for name, wanted in one.items():
        got = mesh.get(name)
        # A buffer that only one of them has, such as a cache of positions.
        if got is None or got.shape != wanted.shape:
            continue
        start = _wide(before[name]) if name in before else torch.zeros((), dtype=torch.float64)
        update = _wide(wanted) - start
        pair = _Pair.of(name, got, wanted, tolerance)
        size = max(tolerance.least, pair.wanted)
        bound = tolerance.update * tolerance.norm(update) + tolerance.rounding * size
        bound = bound if wanted.is_floating_point() else 0.0
        factor = _factor(_wide(got) - start, update, tolerance) if pair.size > bound else None
        pairs.append(replace(pair, bound=bound, factor=factor))
    return _largest("weight", pairs)


def _largest(
    kind: Literal["gradient", "handed", "weight"], pairs: Sequence[_Pair]
) -> Iterator[Difference]:
    """Give the difference of the pair that is furthest beyond its bound, if there is a pair."""
    if not pairs:
        return
    excesses = [_excess(pair.size, pair.bound) for pair in pairs]
    excess = max(excesses)
    pair = pairs[excesses.index(excess)]
    yield Difference(
        kind=kind,
        name=pair.name,
        got=pair.got,
        wanted=pair.wanted,
        size=pair.size,
        excess=excess,
        # Less itself. Where nothing is beyond its bound it is -1, and the difference is not
        # shown.
        others=sum(other > 1 for other in excesses) - 1,
        factor=pair.factor,
    )


def _excess(size: float, bound: float) -> float:
    """Return how many times its bound a difference is; infinity if one of them is not a number."""
    # Without a bound nothing but equality will do.
    excess = size / bound if bound and size else (math.inf if size else 0.0)
    return excess if excess == excess else math.inf


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in 64 bits; of complex numbers, both parts in a last dim."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.double()


def _factor(got: Tensor, wanted: Tensor, tolerance: Tolerance) -> float | None:
    """Return c if `got` is c times `wanted`, by least squares, the only c that can fit."""
    square = float((wanted * wanted).sum())
    if not square or square != square:
        return None
    factor = float((got * wanted).sum()) / square
    rest = tolerance.norm(got - factor * wanted)
    # A factor that explains the difference names the mistake: 2 for a sum in place of a mean of
    # two ranks, 0.5 for the reverse.
    fits = rest <= tolerance.factor * max(tolerance.least, tolerance.norm(got))
    return factor if fits and abs(factor) > 1e-6 else None
