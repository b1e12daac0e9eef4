"""Comparison of the first step on the mesh with that on one process.

Note [Tolerance]: two layouts add the same numbers in another order. What that changes is a few
roundings, relative to the norm of a gradient; where the sum itself is next to nothing (the bias of
a key in attention has no gradient at all), relative to the norm of all gradients. In float64 much
of a model may still compute in float32 (norms, softmax, the loss), hence its tolerance. The update
is compared with that of the same gradients, so that it differs by the roundings of a norm at most.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_par.observe.report import StepRecord

__all__ = ["Difference", "Tolerance", "compare_backwards", "compare_states", "tolerance_of"]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """What a difference may be; see Note [Tolerance].

    Attributes:
        loss: Relative to the loss, or to 1 if that is more.
        gradient: Norm of the difference, relative to the norm of the gradient.
        nothing: Norm of the difference, relative to the norm of all gradients.
        update: Norm of the difference of a weight, relative to the norm of its update.
        rounding: Norm of the difference of a weight, relative to the norm of the weight.
    """

    loss: float
    gradient: float
    nothing: float
    update: float
    rounding: float


_TOLERANCES = {
    torch.float64: Tolerance(loss=5e-7, gradient=2e-6, nothing=2e-8, update=1e-6, rounding=1e-11),
    torch.float32: Tolerance(loss=2e-5, gradient=2e-3, nothing=2e-5, update=2e-3, rounding=1e-6),
    torch.bfloat16: Tolerance(loss=2e-2, gradient=0.1, nothing=3e-2, update=2e-2, rounding=1e-2),
    torch.float16: Tolerance(loss=5e-3, gradient=5e-2, nothing=1e-2, update=2e-2, rounding=2e-3),
}


def tolerance_of(*dtypes: torch.dtype) -> Tolerance:
    """Return the tolerance of the least exact of some dtypes.

    Args:
        dtypes: Of weights, of what is computed, and of what is sent.
    """
    return max((_TOLERANCES[d] for d in dtypes if d in _TOLERANCES), key=lambda t: t.loss)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What differs most.

    Attributes:
        kind: What it is; "closure": how often the optimizer computed the loss.
        name: FQN of the parameter or buffer; empty for a loss.
        got: The loss, or the norm, on the mesh.
        wanted: That on one process.
        apart: Norm of the difference.
        others: How many others of the same kind differ, too.
        factor: c, if what the mesh has is c times what one process has.
    """

    kind: Literal["loss", "closure", "gradient", "weight"]
    name: str
    got: float
    wanted: float
    apart: float
    others: int = 0
    factor: float | None = None

    def __str__(self) -> str:
        if self.kind == "loss":
            return (
                f"the loss of the global batch is {self.got:.9g}, on one process {self.wanted:.9g}"
            )
        if self.kind == "closure":
            return f"the loss was computed {self.got:g} times, on one process {self.wanted:g} times"
        what = f"the {self.kind} of {self.name}" + (
            " after the step" if self.kind == "weight" else ""
        )
        more = f" ({self.others} more differ)" if self.others else ""
        return (
            f"{what} has the norm {self.got:.6g}, on one process {self.wanted:.6g}; the norm of "
            f"the difference is {self.apart:.3g}{more}"
        )


def compare_backwards(mesh: StepRecord, one: StepRecord, tolerance: Tolerance) -> Difference | None:
    """Return how losses or gradients differ, None if they do not.

    Args:
        mesh: What the mesh computed; gradients that are None are not compared.
        one: What one process computed, with as many backwards.
        tolerance: For both.
    """
    for got, wanted in zip(mesh.losses, one.losses, strict=False):
        apart = abs(got - wanted)
        bound = tolerance.loss * max(1.0, abs(wanted))
        if not apart <= bound and not (got != got and wanted != wanted) and got != wanted:
            return Difference(kind="loss", name="", got=got, wanted=wanted, apart=apart)
    for gradients, others in zip(mesh.gradients, one.gradients, strict=False):
        if gradients is None or others is None:
            continue
        found = _compare_gradients(gradients, others, tolerance)
        if found is not None:
            return found
    got, wanted = float(len(mesh.losses)), float(len(one.losses))
    if got != wanted:
        return Difference(kind="closure", name="", got=got, wanted=wanted, apart=got - wanted)
    return None


def _compare_gradients(
    got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: Tolerance
) -> Difference | None:
    everything = _norm_of_all(wanted.values())
    pairs: list[tuple[str, Tensor, Tensor, float]] = []
    for name in sorted({*got, *wanted}):
        one = wanted.get(name)
        mesh = got.get(name)
        if mesh is None and one is None:
            continue
        one = torch.zeros_like(mesh) if one is None else one  # type: ignore[arg-type]
        mesh = torch.zeros_like(one) if mesh is None else mesh
        bound = tolerance.gradient * _norm(one) + tolerance.nothing * everything
        pairs.append((name, mesh, one, bound))
    return _worst("gradient", pairs)


def compare_states(
    before: Mapping[str, Tensor],
    mesh: Mapping[str, Tensor],
    one: Mapping[str, Tensor],
    tolerance: Tolerance,
) -> Difference | None:
    """Return how weights and buffers after the step differ, None if they do not.

    Args:
        before: Name -> value before the step.
        mesh: Name -> value after it on the mesh.
        one: Name -> value after it on one process, from the same gradients.
        tolerance: Of the update.
    """
    pairs = []
    for name, wanted in one.items():
        got = mesh.get(name)
        if got is None or got.shape != wanted.shape:
            continue
        update = _wide(wanted) - _wide(before[name]) if name in before else _wide(wanted)
        bound = tolerance.update * _norm(update) + tolerance.rounding * _norm(wanted)
        if not wanted.is_floating_point():
            bound = 0.0
        pairs.append((name, got, wanted, bound))
    return _worst("weight", pairs, before)


def _worst(
    kind: Literal["gradient", "weight"],
    pairs: Sequence[tuple[str, Tensor, Tensor, float]],
    before: Mapping[str, Tensor] | None = None,
) -> Difference | None:
    """Return the pair that is furthest beyond its bound, if one is."""
    beyond = []
    for name, got, wanted, bound in pairs:
        if torch.equal(got, wanted):
            continue
        apart = _norm(_wide(got) - _wide(wanted))
        same_nan = apart != apart and torch.equal(got.isfinite(), wanted.isfinite())
        if not apart <= bound and not same_nan:
            beyond.append((apart / bound if bound else float("inf"), apart, name, got, wanted))
    if not beyond:
        return None
    _, apart, name, got, wanted = max(beyond, key=lambda b: b[0] if b[0] == b[0] else float("inf"))
    start = _wide(before[name]) if before is not None and name in before else 0.0
    return Difference(
        kind=kind,
        name=name,
        got=_norm(got),
        wanted=_norm(wanted),
        apart=apart,
        others=len(beyond) - 1,
        factor=_factor(_wide(got) - start, _wide(wanted) - start),
    )


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(_wide(tensor)))


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in 64 bits; of complex numbers, both parts in a last dim."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.double()


def _norm_of_all(tensors: Iterable[Tensor]) -> float:
    return math.hypot(*map(_norm, tensors))


def _factor(got: Tensor, wanted: Tensor) -> float | None:
    """Return c if `got` is c times `wanted`, by least squares, the only c that can fit."""
    square = float((wanted * wanted).sum())
    if not square or square != square:
        return None
    factor = float((got * wanted).sum()) / square
    close = _norm(got - factor * wanted) <= 1e-3 * _norm(got)
    return factor if close and abs(factor) > 1e-6 else None
