"""Side effects of blocks, looked for in the first step: what a pipeline would lose in silence.

A block may keep an auxiliary loss on an attribute, write to another module, or append its output to
a list, and code after the blocks may read that. Blocks of other stages do not run here, so that the
code would find less than on one process. What goes through the output of a block, or is declared in
``ParallelPlan(carried=..., captured=...)``, crosses the boundaries of stages.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import nn, Tensor

from lightning_par.engine.pipeline.stage import (
    EarlierBlock,
    StageStub,
    stands_for,
)
from lightning_par.errors import PlanError

__all__ = ["explain_absent", "values_read", "watch_side_effects"]

_Seen = dict[tuple[str, str], tuple[int, int]]
"""Name of a module and of what it keeps -> id of it and its length."""


def watch_side_effects(
    model: nn.Module, fqn: str, carried: Sequence[str], captured: Collection[str] = ()
) -> None:
    """Refuse, when a local block first runs for training, what it leaves behind besides its output.

    Args:
        model: The user's module, cut into stages.
        fqn: Name of the block.
        carried: Attributes of a block that are sent to later stages.
        captured: Modules inside a block whose hooks later stages call as well.
    """
    block = model.get_submodule(fqn)
    ends = tuple(f".{name}" for name in captured)
    before: _Seen = {}

    # Only in training: evaluation has no graph that code after the blocks could need.
    def look(*_: Any) -> None:
        if torch.is_grad_enabled() and block.training:
            before.update(_kept(model))

    def compare(*_: Any) -> None:
        if not before:
            return
        # Once is enough: the code of a block is the same in each step.
        for handle in handles:
            handle.remove()
        found = [key for key, seen in _kept(model).items() if before.get(key) != seen]
        before.clear()
        # What is declared crosses the stages: it is lost by nobody.
        found = [
            (owner, name)
            for owner, name in found
            if name not in carried and not (name.startswith(_HOOK) and owner.endswith(ends))
        ]
        if found:
            raise PlanError("LP409", _text(fqn, *found[0]))

    handles = [
        block.register_forward_pre_hook(look, prepend=True),
        block.register_forward_hook(compare),
    ]


def explain_absent(model: nn.Module, error: Exception, read: Collection[str]) -> PlanError | None:
    """Return what to do about code that reads what a block of another stage leaves on itself.

    Args:
        model: The user's module, cut into stages.
        error: What its step raised.
        read: Names of what the code that raised it reads.

    Returns:
        None if it was about something else.
    """
    if isinstance(error, AttributeError) and isinstance(error.obj, EarlierBlock):
        return _absent(error.obj, str(error.name))
    # Code that read a value of None and used it: "'NoneType' object has no attribute ...".
    if "NoneType" not in str(error):
        return None
    for stub in model.modules():
        if isinstance(stub, EarlierBlock):
            _, block = stands_for(stub)
            for name, value in vars(block).items():
                if value is None and name in read and not name.startswith("_"):
                    return _absent(stub, name)
    return None


def values_read(stub: nn.Module) -> dict[tuple[str, str], Any]:
    """Return FQN and name of each attribute that was read of a stub -> its value here."""
    shape = vars(vars(stub).get("_shape", stub))
    found = dict[tuple[str, str], Any]()
    for part in shape.values():
        if isinstance(part, StageStub):
            found |= values_read(part)
    for name in shape.get("_read", ()):
        at_first = getattr(shape["_shape_only"], name, None)
        # What code has set on the stub since then comes first.
        found[shape["_fqn"], name] = vars(stub).get(name, shape.get(name, at_first))
    return found


def _absent(stub: EarlierBlock, name: str) -> PlanError:
    return PlanError(
        "LP409",
        f"the code reads the attribute {name} of {stands_for(stub)[0]}, which is set when this "
        f"block runs, but the block runs on another pipeline stage. {_OF_ATTRIBUTE.format(name)}. "
        "Or use pipeline_parallel_size=1.",
    )


def _text(fqn: str, owner: str, name: str) -> str:
    if name.startswith(_HOOK):
        what = f"a forward hook of {owner} stores values in a list or dict"
        cure = (
            "If the hook is on a module inside of a block, declare ParallelPlan(captured={name: "
            "entry}), where name is the name of that module in the block and entry is the index "
            "of the value in the output of the module. Otherwise let the block return the value"
        )
    else:
        what = (
            f"{fqn} stores a tensor that requires grad, or appends to a list, in "
            f"{owner or 'the module'}"
        )
        what += f".{name}"
        cure = f"{_OF_ATTRIBUTE.format(name)}; detach the tensor if its gradient is not needed"
    return (
        f"{what}. Under a pipeline the other blocks run on other stages, so code that reads these "
        f"values on one stage would not find those of the other blocks. {cure}. Or use "
        "pipeline_parallel_size=1."
    )


_OF_ATTRIBUTE = (
    "Let the block store the tensor in an attribute of its own and declare "
    "ParallelPlan(carried=({!r},)), or let the block return it with its output"
)
_HOOK = "hook "


def _kept(model: nn.Module) -> _Seen:
    """Return what could hold outputs of blocks: attributes of modules, and what hooks refer to."""
    seen: _Seen = {}
    for fqn, module in model.named_modules():
        if isinstance(module, StageStub):
            continue
        # What weight_norm, spectral_norm and pruning compute anew before each forward.
        own = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}
        own |= {name.removesuffix("_orig") for name in module._parameters}
        for name, value in vars(module).items():
            if name.startswith(("_", "captured_")) or name in own:
                continue
            _note(seen, (fqn, name), value)
        for number, hook in enumerate(module._forward_hooks.values()):
            for place, value in enumerate(_reachable(hook)):
                _note(seen, (fqn, f"{_HOOK}{number} {place}"), value)
    return seen


def _note(seen: _Seen, key: tuple[str, str], value: object) -> None:
    if isinstance(value, Tensor):
        if value.requires_grad and not isinstance(value, nn.Parameter):
            # By id: a new tensor at the same attribute is what a block has left behind.
            seen[key] = id(value), 0
    elif isinstance(value, list | dict) and not isinstance(value, nn.Module):
        seen[key] = id(value), len(value)


def _reachable(hook: Any) -> Iterator[object]:
    """Yield what a hook can write to: its closure, and the arguments bound to it."""
    # A hook that collects outputs mostly appends to a list of its closure.
    for cell in getattr(hook, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from getattr(hook, "args", ())
