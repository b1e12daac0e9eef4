"""Examples for a trace: given, kept by the model, or guessed from its first layers."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn, Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["call_model", "guess_examples", "runs_of"]

_Module = TypeVar("_Module", bound=nn.Module)
_NOTHING = ("clip_gradients", "toggle_optimizer", "untoggle_optimizer")
_TOKENS, _SIZES = (16, 4), (224, 32, 64, 384, 256, 28)
_HOOKS = {
    "training_step": ("on_fit_start", "on_train_start", "on_train_epoch_start"),
    "validation_step": ("on_validation_start", "on_validation_epoch_start"),
    "test_step": ("on_test_start", "on_test_epoch_start"),
    "predict_step": ("on_predict_start", "on_predict_epoch_start"),
}
"""Name of a step -> hooks that a Trainer calls on the module before the first one."""


def call_model(model: nn.Module, example: Any) -> Any:
    """Call a model with its example.

    Args:
        model: Any module.
        example: A tuple of arguments, a mapping of keyword arguments, or the only argument.
    """
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def runs_of(
    model: nn.Module, example: Any, name: str = "training_step"
) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    """Give ways to run a model, each with what it takes, the likely ones first.

    Args:
        model: A module, perhaps a LightningModule.
        example: Of a module with such a step, a batch for it; of any other, see `call_model`.
            None: guesses, for its forward.
        name: Of the step.
    """
    step: Any = getattr(model, name, None)
    if example is None:
        yield from ((partial(call_model, model), guess) for guess in guess_examples(model))
    elif step is not None:
        # First without optimizers and the hooks of a fit, as most steps need none; then with them.
        yield partial(_step, model, name, step), example
        yield partial(_step, model, name, step, hooks=_HOOKS.get(name, ())), example
    else:
        yield partial(call_model, model), example


def _step(
    model: nn.Module,
    name: str,
    step: Callable[..., Any],
    batch: Any,
    hooks: Sequence[str] = (),
) -> Any:
    """Run a step that logs nothing; the state of the model is restored by the trace.

    Args:
        model: The module.
        name: Of the step.
        step: The step.
        batch: What it takes.
        hooks: Of the module, called before it: some make what it needs.

    Returns:
        The loss of a training step; of any other, all that it gives, logs and keeps.
    """
    logged: list[Any] = []
    # In the instance: the trace restores the module's state afterwards.
    model.__dict__["log"] = lambda _, value, *args, **options: logged.append(value)
    model.__dict__["log_dict"] = lambda values, *args, **options: logged.append(values)
    trains = name == "training_step"
    if not trains:
        model.eval()
    # A hook may need a Trainer that is not there; what it makes before that is kept.
    if trains and hooks:
        with suppress(Exception):
            _configure(model)
    for hook in hooks:
        with suppress(Exception):
            getattr(model, hook)()
    if trains and not getattr(model, "automatic_optimization", True):
        return _run_manually(model, partial(step, batch, *[0] * _number_of_indices(step)))
    result = step(batch, *[0] * _number_of_indices(step))
    if trains:
        return result.get("loss") if isinstance(result, Mapping) else result
    registered = ("_parameters", "_buffers", "_modules")
    kept = [v for m in model.modules() for k, v in vars(m).items() if k not in registered]
    return result, logged, [v for v in kept if isinstance(v, Tensor | list | dict | tuple)]


def _configure(model: Any) -> None:
    """Give the Trainer the optimizers and schedules of a run, which steps log or ask for.

    The trace is run in a fork of the process, which ends with it.
    """
    strategy = model.trainer.strategy
    configured = model.configure_optimizers()
    strategy.optimizers = [*_found(configured, Optimizer)]
    schedules = _found(configured, LRScheduler)
    strategy.lr_scheduler_configs = [SimpleNamespace(scheduler=one) for one in schedules]


def _number_of_indices(step: Callable[..., Any]) -> int:
    """Return how many indices, of the batch and of its loader, a step takes after the batch."""
    # By the signature: `training_step(batch)`, `(batch, batch_idx)` or with a loader's index.
    for count in (1, 0):
        try:
            inspect.signature(step).bind(None, *[0] * count)
        except TypeError:
            continue
        return count
    return 2


def guess_examples(model: nn.Module) -> Iterator[Any]:
    """Give inputs that a model may take: images, tokens, features; the likely ones first.

    Args:
        model: Parameters may be on meta.
    """
    given = getattr(model, "example_input_array", None)
    if given is not None:
        yield given
    # A model that takes several arguments cannot be guessed.
    if _number_of_required(model) > 1:
        return
    convolution = _first(model, nn.Conv2d)
    if convolution is not None:
        # What the model says of its images, then sizes that data sets have.
        for size in dict.fromkeys([*_image_sizes(model), *_SIZES]):
            yield (torch.zeros(2, convolution.in_channels, size, size),)
    if _first(model, nn.Embedding) is not None:
        yield from ((torch.zeros(2, tokens, dtype=torch.long),) for tokens in _TOKENS)
    linear = _first(model, nn.Linear)
    if linear is not None:
        yield (torch.zeros(2, _TOKENS[0], linear.in_features),)
        yield (torch.zeros(2, linear.in_features),)


def _first(model: nn.Module, kind: type[_Module]) -> _Module | None:
    return next((module for module in model.modules() if isinstance(module, kind)), None)


def _number_of_required(model: nn.Module) -> int:
    parameters = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is p.empty and p.kind in kinds for p in parameters)


def _image_sizes(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        for name in ("img_size", "image_size", "input_size"):
            value = getattr(module, name, None)
            value = value[-1] if isinstance(value, tuple | list) and value else value
            if isinstance(value, int):
                yield value


class _IdleOptimizer:
    """Stands for an optimizer in the step: it calls closures, and changes nothing.

    Args:
        optimizer: What `configure_optimizers` gave.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state, self.defaults = optimizer.state, optimizer.defaults

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        return None if closure is None else closure()

    def zero_grad(self, *_: Any, **__: Any) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def toggle_model(self, *_: Any, **__: Any) -> Any:
        return nullcontext()

    def __getattr__(self, name: str) -> Any:
        """Return what an optimizer of the user's has; a method of its own may be a kind of step."""
        found = getattr(self.optimizer, name)
        return (lambda *_, **__: None) if callable(found) else found


def _run_manually(model: Any, step: Callable[[], Any]) -> list[Any]:
    """Run a `training_step` in manual optimization; the trace restores the state of the model.

    Gradients are zero after a backward, as a step may take norms of those that are there.

    Args:
        model: The LightningModule.
        step: Calls its step.

    Returns:
        The losses that it would have differentiated.
    """
    losses: list[Any] = []
    configured = model.configure_optimizers()
    idle = [_IdleOptimizer(one) for one in _found(configured, Optimizer)]
    # As they are: they act on the groups of optimizers that are made for the trace alone.
    schedules = [*_found(configured, LRScheduler)] or None

    def manual_backward(loss: Any, *_: Any, **__: Any) -> None:
        # Nothing is differentiated: the trace needs the forward of each loss.
        losses.append(loss)
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                like = {"dtype": parameter.dtype, "device": parameter.device}
                parameter.grad = torch.zeros(parameter.shape, **like)  # which reads no value

    own: dict[str, Any] = {name: lambda *_, **__: None for name in _NOTHING}
    own["optimizers"] = lambda *_, **__: _as_lightning(idle)
    own["lr_schedulers"] = lambda: schedules and _as_lightning(schedules)
    own["manual_backward"] = manual_backward
    vars(model).update(own)
    step()
    return losses


def _found(given: Any, kind: type) -> Iterator[Any]:
    """Give what is of a kind in what `configure_optimizers` returned, in its order."""
    if isinstance(given, kind):
        yield given
    elif isinstance(given, Mapping | list | tuple):
        for one in given.values() if isinstance(given, Mapping) else given:
            yield from _found(one, kind)


def _as_lightning(found: list[Any]) -> Any:
    """Return what `optimizers()` and `lr_schedulers()` give for so many."""
    return found[0] if len(found) == 1 else found
