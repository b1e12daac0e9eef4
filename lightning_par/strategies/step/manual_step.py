"""Steps that run their own backwards and optimizers (manual optimization)."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, ExitStack
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.overrides import TorchFunctionMode

from lightning_par.errors import ConfigurationError
from lightning_par.strategies.step.gradient_norms import GradientNorms
from lightning_par.strategies.step.pipelined_step import take_gradients
from lightning_par.upstream.functions import replaced

__all__ = ["ManualSteps"]


class ManualSteps:
    """What surrounds a step that runs its own backwards, and what they have to know.

    Args:
        module: The user's LightningModule.
        norms: Gives the norms that the step asks for.

    Attributes:
        is_used: Whether the module has such steps.
        step: The `Step` at work, whose weight its backwards take; None outside of it.
    """

    def __init__(self, module: pl.LightningModule, norms: GradientNorms) -> None:
        self.is_used = not module.automatic_optimization
        self.step: Any = None
        self._module, self._norms = module, norms
        self._in_backward = False
        self._is_looking = False

    @contextmanager
    def running(self, step: Any) -> Iterator[None]:
        """Surrounds a training step."""
        self.step = step if self.is_used else None
        try:
            yield
        finally:
            self.step = None

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Surrounds the user's step: norms are over all ranks, and every backward is announced.

        Raises:
            ConfigurationError: It calls ``loss.backward()``.
        """
        is_at_work = self.step is not None or self._is_looking
        if not is_at_work or dist.get_world_size() == 1:
            yield
            return
        with ExitStack() as stack:
            stack.enter_context(self._norms.in_hooks())
            # On the class, as any tensor may be the loss. `manual_backward` ends here as well,
            # which `_in_backward` tells apart.
            refusing = self._refusing(Tensor.backward)
            stack.enter_context(replaced(Tensor, "backward", refusing))
            yield

    def _refusing(self, original: Callable[..., None]) -> Callable[..., None]:
        def backward(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            if not self._in_backward:
                raise ConfigurationError(
                    "LP315",
                    "training_step calls loss.backward(), whose gradients are those of one rank "
                    "only. Call self.manual_backward(loss) instead.",
                )
            original(tensor, *args, **kwargs)

        return backward

    def in_backward(self) -> AbstractContextManager[None]:
        """Surrounds a backward that the strategy knows of."""
        return replaced(self, "_in_backward", True)

    @contextmanager
    def looked_at(self) -> Iterator[list[float]]:
        """Surrounds a step that leaves no trace in optimizers and gradients; gives its losses.

        Backwards and updates are left out, closures run. There is a graph, as a penalty needs one.
        After a backward gradients are zero: a step may take norms of those that are there.
        """
        module, trainer = self._module, self._module.trainer
        found: Any = module.optimizers()
        wrapped = found if isinstance(found, list) else [found]
        parameters = list(module.parameters())
        kept = take_gradients(parameters)
        losses: list[float] = []

        def note(loss: Tensor, *_: Any, **__: Any) -> Tensor:
            losses.append(float(loss.detach()))
            for parameter in parameters:
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            return loss.detach()

        with ExitStack() as stack:
            # `manual_backward` calls the strategy's backward, whatever the precision plugin is.
            stack.enter_context(replaced(trainer.strategy, "backward", note))
            # The user calls `step` of Lightning's wrapper or of the optimizer itself: both are
            # replaced.
            for optimizer in (*trainer.optimizers, *wrapped):
                stack.enter_context(replaced(optimizer, "step", _only_closure))
            # A step may set a learning rate by hand; parameters are the same objects, and stay.
            for optimizer in trainer.optimizers:
                for group in optimizer.param_groups:
                    stack.callback(group.update, {k: v for k, v in group.items() if k != "params"})
            for config in trainer.lr_scheduler_configs:
                stack.enter_context(replaced(config.scheduler, "step", lambda *_, **__: None))
            # `in_step` has to work although no `Step` runs: norms of the look are over all ranks,
            # too.
            self._is_looking = True
            try:
                with _OwnGradients():
                    yield losses
            finally:
                self._is_looking = False
                for parameter, gradient in zip(parameters, kept, strict=True):
                    parameter.grad = gradient


class _OwnGradients(TorchFunctionMode):
    """Refuses gradients of parameters that a step asks for by itself."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.grad:
            given = args[1] if len(args) > 1 else kwargs["inputs"]
            inputs = [given] if isinstance(given, Tensor) else given
            if any(isinstance(each, nn.Parameter) for each in inputs):
                raise ConfigurationError(
                    "LP315",
                    "training_step calls torch.autograd.grad for parameters, which gives the "
                    "gradients of one rank only. Call self.manual_backward(loss), which sums them "
                    "over the ranks, and read or change parameter.grad after it.",
                )
        return func(*args, **kwargs)


def _only_closure(closure: Callable[[], Any] | None = None, **_: Any) -> Any:
    return None if closure is None else closure()
