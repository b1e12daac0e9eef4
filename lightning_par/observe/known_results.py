"""Results of operations on tensors without values, computed once for each layout of arguments.

Every block and every micro-batch asks for the same shapes again. torch's own cache of fake tensors
takes about ten times as long to look something up, and passes operations by that change tensors.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_par.upstream.tensor import storage_key

__all__ = ["KnownResults"]

_PLAIN = (
    *(bool, int, float, str, type(None)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_UNKNOWN: Any = object()


@dataclass(frozen=True, slots=True)
class _Result:
    """A tensor that an operation gives.

    Attributes:
        source: Place among the tensors of the arguments of what it is, or views; None: of none.
        layout: Shape, strides, offset and dtype; None if it is the argument itself.
        device: Device of a tensor that has memory of its own.
    """

    source: int | None
    layout: tuple[Any, Any, int, torch.dtype] | None = None
    device: torch.device | None = None


class KnownResults:
    """Gives the results of an operation with arguments of the same layout as earlier ones.

    Args:
        fakes: Fake tensor mode of the results.
        kind: Class of its tensors.
    """

    def __init__(self, fakes: Any, kind: Any) -> None:
        self._fakes, self._kind = fakes, kind
        self._known: dict[Any, Any] = {}

    def of(self, func: Any, args: Any, kwargs: Any, compute: Callable[[], Any]) -> Any:
        """Return what an operation gives, without its values.

        Args:
            func: The operation.
            args: Its arguments; the results depend on shapes, strides and dtypes of tensors alone.
            kwargs: Likewise.
            compute: Runs it.
        """
        inputs: list[Tensor] = []
        key = self._key(func, args, kwargs, inputs)
        known = self._known.get(key) if key is not None else None
        if known is not None and known is not _UNKNOWN:
            # `many`: list or tuple, in which the operation gives its results.
            many, results = known
            made = [self._make(result, inputs) for result in results]
            # Inside a mode of others nothing can be made: computed, without forgetting the
            # result.
            if not any(each is _UNKNOWN for each in made):
                return many(made) if many is not None else made[0]
        out = compute()
        if key is not None and known is None:
            self._known[key] = self._results(out, inputs)
            # E.g. `resize_` or `t_`: given out again, the argument would keep its old shape.
            if self._key(func, args, kwargs, []) != key:  # it has changed the layout of an argument
                self._known[key] = _UNKNOWN
        return out

    def _key(self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor]) -> Any:
        """Return what the results depend on, or None; put the tensors into `inputs`."""
        key: list[Any] = [func]
        if not self._spell(args, key, inputs):
            return None
        if kwargs and not self._spell([*kwargs, *kwargs.values()], key, inputs):
            return None
        if len(inputs) > 1:
            # Which arguments are one tensor: `add_(x, x)` and `add_(x, y)` have the same layouts.
            places: dict[int, int] = {}
            key += [places.setdefault(id(t), place) for place, t in enumerate(inputs)]
        return tuple(key)

    def _spell(self, values: Sequence[Any], key: list[Any], inputs: list[Tensor]) -> bool:
        key.append(len(values))
        for value in values:
            if isinstance(value, Tensor):
                # A sparse tensor has no strides, and a conjugate view of a complex one has a flag
                # besides.
                if value.layout is not torch.strided or value.dtype.is_complex:
                    return False
                device = value.fake_device if isinstance(value, self._kind) else value.device
                key += (value.shape, value.stride(), value.storage_offset(), value.dtype, device)
                inputs.append(value)
            elif type(value) in _PLAIN:
                # With the type, as 1, 1.0 and True are equal keys, but not equal arguments.
                key += (type(value), value)
            elif not isinstance(value, list | tuple) or not self._spell(value, key, inputs):
                return False
        return True

    def _results(self, out: Any, inputs: Sequence[Tensor]) -> Any:
        """Return how to make such results again: the kind of their sequence, and each of them."""
        many = type(out) if type(out) in (list, tuple) else None
        results = [self._result(each, inputs) for each in (out if many else [out])]
        storages = [
            storage_key(each.untyped_storage())
            for each, result in zip(out if many else [out], results, strict=True)
            if result is not _UNKNOWN and result is not None and result.source is None
        ]
        # Two results in one new storage would each get one of their own.
        if any(result is _UNKNOWN for result in results) or len(storages) > len(set(storages)):
            return _UNKNOWN
        return many, results

    def _result(self, leaf: Any, inputs: Sequence[Tensor]) -> Any:
        if leaf is None:
            return None
        # Itself first: it shares the storage with itself, too.
        for place, given in enumerate(inputs):
            if leaf is given:
                return _Result(place)
        if not isinstance(leaf, self._kind):
            return _UNKNOWN
        layout = leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype
        storage = leaf.untyped_storage()
        for place, given in enumerate(inputs):
            if storage_key(given.untyped_storage()) == storage_key(storage):
                return _Result(place, layout)
        result = _Result(None, layout, leaf.fake_device)
        # Tried at once: a storage that is larger than its tensor (`empty_strided` makes the
        # least) would count too few bytes.
        again = self._make(result, inputs)
        is_same = again is not _UNKNOWN and again.untyped_storage().nbytes() == storage.nbytes()
        return result if is_same else _UNKNOWN

    def _make(self, result: _Result | None, inputs: Sequence[Any]) -> Any:
        if result is None:
            return None
        source = None if result.source is None else inputs[result.source]
        if result.layout is None:
            return source
        shape, stride, offset, dtype = result.layout
        if source is None:
            made = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        else:
            made = torch.empty(0, dtype=dtype, device="meta")
        # A mode of others turned it into a tensor of its own.
        if type(made) is not Tensor:
            return _UNKNOWN  # inside a mode of others, as that in which DTensor looks shapes up
        if source is None:
            return self._kind(self._fakes, made, result.device)
        # A view: the storage is the argument's, so that its bytes count once.
        made.set_(source.untyped_storage(), offset, shape, stride)
        return self._kind(self._fakes, made, source.fake_device)
