"""Examples for a trace: given, kept by the model, or guessed from its first layers."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

__all__ = ["call_model", "guess_examples", "runs_of"]

_Module = TypeVar("_Module", bound=nn.Module)
_TOKENS, _SIZES = (16, 4), (224, 32, 64, 384, 256, 28)


def call_model(model: nn.Module, example: Any) -> Any:
    """Call a model with its example.

    Args:
        model: Any module.
        example: A tuple of arguments, a mapping of keyword arguments, or the only argument.
    """
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def runs_of(model: nn.Module, example: Any) -> Iterator[tuple[Callable[[Any], Any], Any]]:
    """Give ways to run a model, each with what it takes, the likely ones first.

    Args:
        model: A module, perhaps a LightningModule.
        example: Of a module with a `training_step`, a batch for it; of any other, see `call_model`.
            None: guesses, for its forward.
    """
    step: Any = getattr(model, "training_step", None)
    if example is None:
        yield from ((partial(call_model, model), guess) for guess in guess_examples(model))
    elif step is not None:
        yield partial(_step, model, step), example
    else:
        yield partial(call_model, model), example


def _step(model: nn.Module, step: Callable[..., Any], batch: Any) -> Any:
    """Run a training step that logs nothing; the state of the model is restored by the trace."""
    model.__dict__["log"] = model.__dict__["log_dict"] = lambda *args, **options: None
    result = step(batch, 0)
    return result.get("loss") if isinstance(result, Mapping) else result


def guess_examples(model: nn.Module) -> Iterator[Any]:
    """Give inputs that a model may take: images, tokens, features; the likely ones first.

    Args:
        model: Parameters may be on meta.
    """
    given = getattr(model, "example_input_array", None)
    if given is not None:
        yield given
    if _number_of_required(model) > 1:
        return
    convolution = _first(model, nn.Conv2d)
    if convolution is not None:
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
