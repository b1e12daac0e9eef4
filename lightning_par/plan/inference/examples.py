"""Examples for a trace: given, kept by the model, or guessed from its first layers."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import nn

__all__ = ["call_model", "guess_examples"]

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
