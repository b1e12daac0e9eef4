"""Captured outputs: outputs inside the blocks that a model reads through forward hooks.

A model may register a hook on every router and read their logits after the last block. Under a
pipeline, the routers of earlier stages do not exist; the stub of their block holds a fake of the
same class, which returns what the stage of the block sent, so that the hook runs.
"""

from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any, cast

from torch import nn, Tensor

from lightning_par.errors import PlanError

__all__ = ["add_stand_ins", "captured_names", "keep_outputs"]


def captured_names(captured: Mapping[str, int]) -> tuple[str, ...]:
    """Return the attributes of a block under which the outputs are carried to later stages.

    Args:
        captured: Name of a module inside a block -> entry of its output.
    """
    return tuple(_attribute(path) for path in captured)


def keep_outputs(block: nn.Module, captured: Mapping[str, int]) -> None:
    """Register hooks that keep the captured outputs as attributes of a local block.

    Args:
        block: A local block. Modules that it lacks are skipped: blocks may differ.
        captured: Name of a module inside a block -> entry of its output.
    """
    modules = dict(block.named_modules())
    for path, index in captured.items():
        if path in modules:
            modules[path].register_forward_hook(_keeper(block, path, index))


def add_stand_ins(
    stub: nn.Module, block: nn.Module, captured: Mapping[str, int], base: type[nn.Module]
) -> Callable[[], None] | None:
    """Put fakes of the captured modules into the stub of a block.

    Args:
        stub: Changed in place; it has no modules yet.
        block: The block that it replaces; hooks that its modules already have are kept.
        captured: Name of a module inside a block -> entry of its output.
        base: Base class of all stubs.

    Returns:
        A function that calls the fakes, None if there are none; before it, the stub gets the
        attributes of `captured_names`.
    """
    modules = dict(block.named_modules())
    fakes = []
    # In the order of the plan; a block that lacks a module has no output to answer for.
    for path in captured:
        if path not in modules:
            continue
        *parents, name = path.split(".")
        owner = stub
        for parent in parents:
            if parent not in owner._modules:
                owner._modules[parent] = base()
            owner = cast(nn.Module, owner._modules[parent])
        # `isinstance` of the real class, as models look for their routers by it.
        kind = _fake_class(cast(Hashable, type(modules[path])), cast(Hashable, base))
        # Not the class's own __init__, which would make parameters.
        fake = kind.__new__(kind)
        nn.Module.__init__(fake)
        # The model's own hooks, which are to see the output.
        fake._forward_hooks.update(modules[path]._forward_hooks)
        fake.__dict__["_answer"] = _answerer(stub, path)
        owner._modules[name] = fake
        fakes.append(fake)

    def replay() -> None:
        for fake in fakes:
            fake()

    return replay if fakes else None


def _attribute(path: str) -> str:
    return "captured_" + path.replace(".", "_")


def _keeper(block: nn.Module, path: str, index: int) -> Callable[[nn.Module, Any, Any], None]:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        is_entry = isinstance(output, tuple | list)
        value = output[index] if is_entry else output
        if not isinstance(value, Tensor):
            kind, found = type(output).__name__, type(value).__name__
            seen = f"This output is a {kind}, and not a tensor. Name"
            if is_entry:
                seen = (
                    f"This output is a {kind}, and its entry {index} is a {found}, not a tensor. "
                    "Give the index of an entry that is a tensor, as in "
                    f"captured={{{path!r}: {index + 1}}}; or name"
                )
            raise PlanError(
                "LP212",
                f"ParallelPlan(captured=...) names {path!r}, so a pipeline sends a tensor of the "
                f"output of this module to other stages. {seen} a module inside of it that returns "
                "the tensor which other stages need.",
            )
        kept = (*[None] * index, value) if is_entry else value  # as hooks of the model index it
        # Past nn.Module.__setattr__, which would take a tensor for a buffer to check.
        object.__setattr__(block, _attribute(path), kept)

    return hook


def _answerer(stub: nn.Module, path: str) -> Callable[[], Any]:
    return lambda: stub.__dict__[_attribute(path)]


def _answer(self: Any) -> Any:
    return self._answer()


@cache
def _fake_class(real: Hashable, base: Hashable) -> type[nn.Module]:
    assert isinstance(real, type)
    assert isinstance(base, type)
    return type(f"Earlier{real.__name__}", (base, real), {"forward": _answer})
