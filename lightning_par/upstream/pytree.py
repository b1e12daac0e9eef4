"""Nests of lists, tuples, dicts and registered classes (`torch.utils._pytree`).

torch has no public module for them in 2.11 and 2.13. Only its own knows what else is registered,
such as the outputs of transformers, and hands its specs to `torch.export` and the compiler.

====================  =============================================================
`tree_flatten`        the leaves, and a spec to rebuild the nest
`tree_leaves`         the leaves
`tree_map`            the nest with a function applied to every leaf
`tree_unflatten`      the nest of a spec with other leaves
====================  =============================================================

What watches every call of torch asks `leaves_of` and `map_leaves`: they give the same in a fraction
of the time, if a nest holds what calls usually take.
"""

from collections.abc import Callable
from types import NoneType
from typing import Any

import torch
from torch import nn, Tensor

from lightning_par.upstream.presence import names_of

with names_of("torch"):
    from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["leaves_of", "map_leaves", "tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]

_PLAIN = {NoneType, bool, float, int, slice, str}
_OF_TORCH = {torch.device, torch.dtype, torch.Generator, torch.layout, torch.memory_format}
_LEAVES = frozenset({Tensor, nn.Parameter, *_PLAIN, *_OF_TORCH})


def leaves_of(tree: Any) -> list[Any]:
    """Return what `tree_leaves` returns."""
    found: list[Any] = []
    _add_leaves(tree, found)
    return found


def _add_leaves(tree: Any, found: list[Any]) -> None:
    kind = type(tree)
    if kind is tuple or kind is list:
        items = tree
    elif kind is dict:
        items = tree.values()
    else:
        found += [tree] if _is_leaf(tree) else tree_leaves(tree)
        return
    for item in items:
        if type(item) in _LEAVES:
            found.append(item)
        else:
            _add_leaves(item, found)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return what `tree_map` returns."""
    kind = type(tree)
    if kind is tuple:
        return tuple([map_leaves(function, item) for item in tree])
    if kind is list:
        return [map_leaves(function, item) for item in tree]
    if kind is dict:
        return {name: map_leaves(function, item) for name, item in tree.items()}
    return function(tree) if _is_leaf(tree) else tree_map(function, tree)


def _is_leaf(value: Any) -> bool:
    return type(value) in _LEAVES or isinstance(value, Tensor)
