"""What stands for a parameter of another pipeline stage where a user's step reads it."""

import inspect
import sysconfig
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import lightning
import torch
from torch import nn, Tensor

from lightning_par.errors import PlanError
from lightning_par.upstream.pytree import tree_leaves, tree_map
from lightning_par.upstream.tensor import (
    asks_for_changes,
    make_subclass,
    UNSAVED_BUFFERS,
)

__all__ = [
    "END_OF_HOOK",
    "About",
    "AbsentParameter",
    "AbsentPart",
    "HookView",
    "Refusals",
    "absent_parameter",
    "describe_tensors",
    "is_of_a_framework",
    "module_refusal",
    "user_line",
]

_CURE = (
    "For a penalty on weights use weight_decay of the optimizer, or add the gradient of the "
    "penalty to p.grad in on_after_backward (p.grad.add_(p, alpha=...)), which runs on every "
    "stage for its own parameters. To change weights, do it in on_train_batch_start or "
    "on_train_batch_end, not in the step. To use a small module on every stage, name it in "
    "ParallelPlan(replicated=...). Otherwise use pipeline_parallel_size=1."
)
_OURS = Path(__file__).resolve().parents[2]
_FRAMEWORKS = (*(str(Path(p.__file__ or "").parent) for p in (torch, lightning)), str(_OURS))
_LIBRARY = sysconfig.get_path("stdlib")
_PROPERTIES = "device dtype layout shape ndim grad is_leaf is_meta is_cuda is_cpu"
# `__torch_function__` is handed a property as the `__get__` of its descriptor, a method as the
# function itself.
_TELLS = frozenset(
    {
        *(getattr(Tensor, name).__get__ for name in _PROPERTIES.split()),
        *(getattr(Tensor, name) for name in ("dim", "element_size", "numel", "size", "is_complex")),
        Tensor.is_floating_point,
        Tensor.__hash__,
        *(Tensor.data_ptr, Tensor.is_inference, asks_for_changes),
        torch.is_floating_point,
        torch.numel,
    }
)
"""What may be asked of a parameter that is not here."""
_KEEPS = frozenset(
    {
        *(Tensor.detach, Tensor.clone, Tensor.copy_),
        getattr(Tensor, "data").__get__,  # noqa: B009
    }
)


@dataclass
class About:
    """What every rank knows of a parameter or buffer, whichever stage holds it.

    Attributes:
        name: Its FQN, the first of a tied parameter.
        shape: Its whole shape.
        dtype: Its dtype when the model was made.
        requires_grad: Whether it is trained, as far as this rank knows now.
        is_buffer: Whether it is a buffer.
        is_saved: Whether a state dict has it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    is_buffer: bool = False
    is_saved: bool = True


END_OF_HOOK = "the end of the hook"
"""What a rank whose hook has ended tells the others in place of a next exchange."""


def describe_tensors(module: nn.Module) -> dict[str, About]:
    """Return what a stage that lacks a parameter or buffer has to know of it, by every name.

    Args:
        module: Whole; parameters may be on meta.
    """
    known, firsts = dict[str, About](), dict[int, About]()
    for name, p in module.named_parameters(remove_duplicate=False):
        about = About(name, tuple(p.shape), p.dtype, p.requires_grad)
        known[name] = firsts.setdefault(id(p), about)
    for prefix, part in module.named_modules():
        for name, buffer in part.named_buffers(prefix, recurse=False):
            is_saved = name.rpartition(".")[2] not in vars(part)[UNSAVED_BUFFERS]
            known[name] = About(name, tuple(buffer.shape), buffer.dtype, False, True, is_saved)
    return known


class HookView(Protocol):
    """What a hook outside of the steps sees of parameters that other stages hold."""

    def absent(self, about: About) -> Tensor:
        """Return what stands for a parameter."""

    def agree(self, what: str) -> None:
        """Raise, on all ranks, if other ranks are not about to do `what`, too."""

    def paused(self) -> AbstractContextManager[None]:
        """Surround code of this package inside the hook, which sees this rank's tensors."""


@dataclass(kw_only=True)
class Refusals:
    """The refusals of reads of parameters that other stages hold.

    Attributes:
        waits: Whether a read is only written down, for all stages to raise together.
        text: The first refusal; empty: none.
    """

    waits: bool
    text: str = ""


class AbsentParameter(Tensor):
    """A parameter of another stage: it has a shape, a dtype, a device, and no value."""

    about: About
    refusals: Refusals

    @property
    def fqn(self) -> str:
        """Its FQN."""
        return self.about.name

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained."""
        return self.about.requires_grad

    @requires_grad.setter
    def requires_grad(self, flag: bool) -> None:
        # The stage that holds it does that, too, or hears of it after the step.
        self.about.requires_grad = flag

    def requires_grad_(self, requires_grad: bool = True) -> "AbsentParameter":
        """Set whether the parameter is trained."""
        self.requires_grad = requires_grad
        return self

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        # torch's own repr formats values, and would be refused as a read of them.
        return f"AbsentParameter({self.fqn})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse a function that needs a value; if stages have to agree, any value stands in."""
        kwargs = kwargs or {}
        if func in _TELLS:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _KEEPS and all(isinstance(value, cls) for value in args):
            # For what notes and restores attributes, without a value.
            return args[0] if func == Tensor.copy_ else _made_of(func, args[0])
        absent = next(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, cls))
        if not absent.refusals.waits:
            raise PlanError(
                "LP408",
                f"a hook read {absent.fqn}, which is on another pipeline stage, and the result is "
                f"used{user_line()} after the hook has ended. Inside the hook, on every rank, "
                "convert the result with float(), .tolist() or .numpy(), or call "
                "trainer.strategy.full_parameter(name).",
            )
        text = _refusal(absent.fqn)
        # The first read is the cause; later ones may only meet the ones that stood in for it.
        absent.refusals.text = absent.refusals.text or text
        with torch.DisableTorchFunctionSubclass():
            plain = tree_map(_plain, (args, kwargs))
            return func(*plain[0], **plain[1])


def _made_of(func: Any, absent: AbsentParameter) -> AbsentParameter:
    """Return what stands for the values of a parameter, with the flag that torch gives them."""
    if not absent.requires_grad or (func == Tensor.clone and torch.is_grad_enabled()):
        return absent
    made: AbsentParameter | None = vars(absent).get("detached")
    if made is None or made.requires_grad:
        about = replace(absent.about, requires_grad=False)
        made = absent_parameter(about, absent.device, absent.refusals)
        vars(absent)["detached"] = made  # the same again: values are compared by identity
    return made


def _plain(value: Any) -> Any:
    """Return ones: the step is refused when all stages have run it, whatever it computes."""
    if not isinstance(value, AbsentParameter):
        return value
    return torch.ones(value.shape, dtype=value.dtype, device=value.device)


def absent_parameter(
    about: About,
    device: torch.device,
    refusals: Refusals,
) -> AbsentParameter:
    """Return what stands for a parameter of another stage; it takes no memory.

    Args:
        about: What is known of it.
        device: Device of this rank.
        refusals: Where reads of it are written down.
    """
    # One element with stride 0 in every dim: the shape of the parameter without its memory.
    value = torch.zeros((), dtype=about.dtype, device=device).expand(about.shape)
    made = make_subclass(AbsentParameter, value, False)
    made.about, made.refusals = about, refusals
    return made


class AbsentPart:
    """A module inside a block of another stage, of which only parameters may be asked.

    Args:
        parameters: What is known of those below it, by their names from here.
        make: Returns what stands for a parameter.
    """

    def __init__(self, parameters: Mapping[str, About], make: Callable[[About], Tensor]) -> None:
        self._parameters_below, self._make = parameters, make

    def __getattr__(self, name: str) -> Any:
        # `copy`, `pickle` and `hasattr` probe names such as `__deepcopy__`, which have to be
        # absent.
        if name.startswith("_"):
            raise AttributeError(name)
        about = self._parameters_below.get(name)
        if about is not None:
            return self._make(about)
        prefix = f"{name}."
        known = self._parameters_below.items()
        parts = {n.removeprefix(prefix): a for n, a in known if n.startswith(prefix)}
        if not parts:
            raise AttributeError(name)
        return AbsentPart(parts, self._make)

    def __call__(self, *_: Any, **__: Any) -> Any:
        """Raise: it cannot run here."""
        raise PlanError("LP408", _refusal(next(iter(self._parameters_below.values())).name))


def module_refusal(fqn: str, name: str) -> str:
    """Return the refusal of an attribute that a step reads in a block of its own stage."""
    return (
        f"the step reads {name} of {fqn}{user_line()}, a module inside a block. A loop over "
        f"modules() finds only the blocks of this pipeline stage. {_CURE}"
    )


def _refusal(fqn: str) -> str:
    return (
        f"the step uses {fqn}{user_line()}, but this parameter is on another pipeline stage. "
        f"{_CURE}"
    )


def user_line() -> str:
    """Return `` at file.py:12``: the innermost line outside of torch, Lightning and this package;
    empty if there is none.
    """
    frame = inspect.currentframe()
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_of_a_framework(file):
            return f" at {Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_of_a_framework(file: str) -> bool:
    """Return whether a file belongs to torch, Lightning, this package or Python's library."""
    is_installed = "site-packages" in file or "dist-packages" in file
    return file.startswith(_FRAMEWORKS) or (file.startswith(_LIBRARY) and not is_installed)
