"""A step that gives no loss, to leave a batch out.

On one process it moves nothing, and counts. So does it on a mesh where all replicas leave out their
part of the batch, which they have to agree on (`self.all_gather`). Whether they do is read from the
code of the step: only then do they vote in every step. Else a replica that leaves out its part ends
the run at once: the others wait in messages of the step itself, as of its logs.
"""

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh

__all__ = ["SkippedSteps", "gives_none_alone", "may_skip"]

_CURE = (
    "To skip a batch because of its data, remove its samples from the data set (a collate_fn must "
    "return a batch on every replica). To skip it because of its loss, log the loss with "
    "sync_dist=True, read it from trainer.callback_metrics in on_before_optimizer_step, and set "
    "every p.grad = None there."
)


class SkippedSteps:
    """Lets all ranks leave out a step, or none.

    Args:
        module: The user's LightningModule.
        mesh: Its replicas see other samples.
    """

    def __init__(self, module: pl.LightningModule, mesh: ParallelMesh) -> None:
        self._module, self._world = module, mesh.sizes.world_size
        self._shares = mesh.sizes.shares
        # From the code, which is the same on every rank: whether ranks vote must not depend on
        # what the step of one of them gave.
        self._asks = self._shares > 1 and may_skip(module)

    def is_skipped(self, output: Any) -> bool:
        """Tell whether a step is left out, the same on every rank.

        Args:
            output: What `training_step` returned.

        Raises:
            ConfigurationError: It is on some replicas only, or gradients accumulate.

        **Communicates**: one all-reduce of a number over all ranks, where the code of the step may
        leave out one, and several see other samples.
        """
        if self._world == 1:
            return False
        loss = output.get("loss") if isinstance(output, Mapping) else output
        # A loss without a graph trains nothing, as None does.
        skips = loss is None or (isinstance(loss, Tensor) and loss.grad_fn is None)
        if not self._asks:
            # Without a vote the others cannot be told: this rank can only end the run.
            if skips and self._shares > 1:
                self._refuse("a replica")
            count = self._world * skips
        else:
            votes = torch.tensor(float(skips), device=self._module.device)
            dist.all_reduce(votes)
            count = int(votes)
        if 0 < count < self._world:
            self._refuse(f"{count} of {self._world} ranks")
        # Its gradients would be mixed with those of batches that count.
        if count and self._module.trainer.accumulate_grad_batches > 1:
            self._refuse("a batch whose gradients accumulate with those of others")
        return count > 0

    def _refuse(self, where: str) -> None:
        raise ConfigurationError(
            "LP318",
            f"{type(self._module).__name__}.training_step returned no loss on {where}, but a run "
            "on one process skips whole batches. Let all replicas decide before the model is "
            "called: `if self.all_gather(flag).any(): return None`. "
            f"{_CURE} No weight was changed in this step.",
        )


def may_skip(module: pl.LightningModule) -> bool:
    """Whether the code of a `training_step` may give None, or a loss without a graph, and asks the
    other replicas.

    Args:
        module: Its methods that give what the step gives are read, too.
    """
    values = [value for tree in _trees(module) for value in _returned(tree)]
    skips = any(value is None or any(map(_is_nothing, ast.walk(value))) for value in values)
    return skips and _asks_others(module)


def gives_none_alone(module: pl.LightningModule) -> bool:
    """Whether the code of a `training_step` returns None by itself, without asking the others.

    Args:
        module: Its methods that give what the step gives are read, too.
    """
    values = (value for tree in _trees(module) for value in _returned(tree))
    is_none = any(isinstance(v, ast.Constant) and v.value is None for v in values)
    return module.automatic_optimization and is_none and not _asks_others(module)


def _trees(module: pl.LightningModule) -> Iterator[ast.AST]:
    """Yield the code of `training_step`, and of the methods that give what it gives."""
    seen: set[str] = set()
    names = ["training_step"]
    # Transitively: `return self._shared_step(batch)` gives what that method gives.
    while names:
        name = names.pop()
        if name in seen:
            continue
        seen.add(name)
        tree = _code_of(getattr(type(module), name, None))
        if tree is None:
            continue
        yield tree
        for value in filter(None, _returned(tree)):
            names += [c.func.attr for c in ast.walk(value) if _is_own_call(c)]  # type: ignore[attr-defined]


def _asks_others(module: pl.LightningModule) -> bool:
    nodes = (node for tree in _trees(module) for node in ast.walk(tree))
    return any(isinstance(n, ast.Attribute) and n.attr == "all_gather" for n in nodes)


def _code_of(function: Callable[..., Any] | None) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))  # type: ignore[arg-type]
    # No code, as of a compiled or generated method: then nothing is assumed of it.
    except (OSError, TypeError, SyntaxError):  # made without a file
        return None


def _returned(tree: ast.AST) -> Iterator[ast.expr | None]:
    """Yield what a function returns, and what it gives a name that it returns."""
    returns = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return)]
    names = {value.id for value in returns if isinstance(value, ast.Name)}
    yield from returns
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id in names for target in node.targets
        ):
            yield node.value


def _is_nothing(node: ast.AST) -> bool:
    is_leaf = isinstance(node, ast.keyword) and node.arg == "requires_grad"
    return is_leaf or (isinstance(node, ast.Constant) and node.value is None)


def _is_own_call(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "self"
    )
