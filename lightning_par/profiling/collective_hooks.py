"""Hears every communication of this process, at the places where torch hands it to a process group.

Note [Where to listen]: Python code, FSDP2 and point-to-point call methods of `ProcessGroup`;
DTensor and compiled code call operators of ``_c10d_functional``. While a wiretap is entered, both
are replaced by ones that call what was there and then tell what they heard. Operators that compute
are left alone, so that a step runs as fast as without, on whichever thread; a dispatch mode would
be asked about each of them, and would make compiled code compile again.

Note [Interpreter lock]: a worker thread of gloo may need the lock to let go of a tensor while it
holds the queue that the next call needs. So nothing that was there may be called with the lock
held, as calling a kernel object would. The functional operators have one composite kernel for every
backend: under the key of another backend it is reached without coming back here, and redispatching
lets go of the lock.

The replacement is of the process. Hooks may be nested; the one entered last is left first.
Communication that C++ code starts by itself, as DDP's reducer does, is not heard. Copies between
the device and the host are heard where an offloaded optimizer makes them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.library import get_kernel, Library

from lightning_par.engine.offload.copy_stream import CopyStream
from lightning_par.upstream.dispatch import lazy_keys, remove_kernels
from lightning_par.upstream.distributed import functional_operators, group_named

__all__ = ["Call", "CollectiveHook"]


@dataclass(frozen=True, slots=True)
class Call:
    """One communication that was called.

    Args:
        operation: ``"all_reduce"``, ``"all_gather"``, ...
        tensors: Those that are counted, in any nest.
        is_part: Whether they are one of as many equal parts as the group has ranks.
        group: Where.
        root: The rank of the group that the operation starts or ends at, None if there is none.
        splits: Of an all-to-all's input along dim 0; empty: equal parts, or a list of tensors.
    """

    operation: str
    tensors: Any
    is_part: bool
    group: dist.ProcessGroup
    root: int | None
    splits: tuple[int, ...]


@dataclass(frozen=True)
class _Form:
    """How to read the arguments of a method or an operator, without its group."""

    operation: str
    counted: int = 0
    is_part: bool = False
    root: int | None = None
    splits: int | None = None

    def read(self, group: dist.ProcessGroup, args: tuple[Any, ...]) -> Call:
        root = None if self.root is None else args[self.root]
        return Call(
            operation=self.operation,
            tensors=args[self.counted],
            is_part=self.is_part,
            group=group,
            root=getattr(root, "rootRank", root),
            splits=() if self.splits is None else tuple(args[self.splits]),
        )


_METHODS: Mapping[str, _Form] = MappingProxyType(
    {
        "_allgather_base": _Form("all_gather"),
        "_reduce_scatter_base": _Form("reduce_scatter", 1),
        "all_gather_single": _Form("all_gather"),
        "all_gather_single_coalesced": _Form("all_gather"),
        "all_to_all_single": _Form("all_to_all", 1, splits=3),
        "allgather": _Form("all_gather"),
        "allgather_coalesced": _Form("all_gather"),
        "allgather_into_tensor_coalesced": _Form("all_gather"),
        "allreduce": _Form("all_reduce"),
        "allreduce_coalesced": _Form("all_reduce"),
        "alltoall": _Form("all_to_all", 1),
        "alltoall_base": _Form("all_to_all", 1, splits=3),
        "broadcast": _Form("broadcast", root=1),
        "gather": _Form("gather", 1, is_part=True, root=2),
        "recv": _Form("recv"),
        "recv_anysource": _Form("recv"),
        "reduce": _Form("reduce", root=1),
        "reduce_scatter": _Form("reduce_scatter", 1),
        "reduce_scatter_single": _Form("reduce_scatter", 1),
        "reduce_scatter_single_coalesced": _Form("reduce_scatter", 1),
        "reduce_scatter_tensor_coalesced": _Form("reduce_scatter", 1),
        "scatter": _Form("scatter", is_part=True, root=2),
        "send": _Form("send"),
    }
)
"""Methods of `ProcessGroup`; versions of torch have different ones."""

_OPERATORS: Mapping[str, _Form] = MappingProxyType(
    {
        "all_gather_into_tensor": _Form("all_gather", is_part=True),
        "all_gather_into_tensor_coalesced": _Form("all_gather", is_part=True),
        "all_gather_into_tensor_out": _Form("all_gather", is_part=True),
        "all_reduce": _Form("all_reduce"),
        "all_reduce_": _Form("all_reduce"),
        "all_reduce_coalesced": _Form("all_reduce"),
        "all_reduce_coalesced_": _Form("all_reduce"),
        "all_to_all_single": _Form("all_to_all", splits=2),
        "broadcast": _Form("broadcast", root=1),
        "broadcast_": _Form("broadcast", root=1),
        "irecv": _Form("recv"),
        "isend": _Form("send"),
        "reduce_scatter_tensor": _Form("reduce_scatter"),
        "reduce_scatter_tensor_coalesced": _Form("reduce_scatter"),
        "reduce_scatter_tensor_out": _Form("reduce_scatter"),
    }
)
"""Operators of ``_c10d_functional``, whose last argument is the group."""

_NAMESPACE = "_c10d_functional"
_ELSEWHERE = lazy_keys()
"""Another backend's key; see Note [Interpreter lock]."""


class CollectiveHook(ABC):
    """Hears the communication of this process while it is entered; see Note [Where to listen]."""

    def __init__(self) -> None:
        self._library: Library | None = None
        self._replaced: list[tuple[type, str, Any]] = []

    @abstractmethod
    def _mark(self) -> Any:
        """Return this point in time."""

    @abstractmethod
    def _heard(self, call: Call, result: Any, began: Any) -> None:
        """Hear that something has been called.

        Args:
            call: What.
            result: What the caller will wait for: a work, or tensors.
            began: When it was called.
        """

    @abstractmethod
    def _waited(self, what: dist.Work | Tensor, began: Any) -> None:
        """Hear that this rank has waited, until now.

        Args:
            what: The work or the tensor that it waited for.
            began: When it began to wait.
        """

    @abstractmethod
    def _copied(self, operation: str, tensor: Tensor) -> None:
        """Hear that a tensor was copied between the device and the host.

        Args:
            operation: ``"to_host"`` or ``"to_device"``.
            tensor: What was copied.
        """

    def _enter(self) -> None:
        for name, form in _METHODS.items():
            if name in vars(dist.ProcessGroup):
                self._replace(dist.ProcessGroup, name, partial(self._method, form))
        self._replace(dist.Work, "wait", self._wait_method)
        for name in ("to_host", "to_device"):
            self._replace(CopyStream, name, partial(self._copy_method, name))
        self._library = Library(_NAMESPACE, "IMPL")
        for key in ("CPU", "CUDA"):
            for name, form in _OPERATORS.items():
                if hasattr(functional_operators, name):
                    self._implement(name, key, partial(self._operator, form))
            self._implement("wait_tensor", key, self._wait_operator)

    def _exit(self) -> None:
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)
        self._replaced = []
        assert self._library is not None
        remove_kernels(self._library)
        self._library = None

    def _replace(self, owner: type, name: str, listening: Callable[[Any], Any]) -> None:
        # What the class holds binds itself to an instance; what it answers with does not.
        self._replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, listening(getattr(owner, name)))

    def _implement(self, name: str, key: str, listening: Callable[[Any], Any]) -> None:
        """Register a kernel of an operator that gets a function which calls the one before."""
        assert self._library is not None
        operator = getattr(functional_operators, name).default

        def composite(_: Any, *args: Any, **options: Any) -> Any:
            return operator.redispatch(_ELSEWHERE, *args, **options)

        before: Any = composite
        if operator.has_kernel_for_dispatch_key(key):
            before = get_kernel(operator, key).call_boxed  # of another wiretap
        self._library.impl(name, listening(before), key, with_keyset=True)

    def _method(self, form: _Form, original: Any) -> Callable[..., Any]:
        def method(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
            began = self._mark()
            work = original(group, *args, **options)
            self._heard(form.read(group, (*args, *options.values())), work, began)
            return work

        return method

    def _operator(self, form: _Form, before: Any) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any, **options: Any) -> Any:
            began = self._mark()
            result = before(keys, *args, **options)
            self._heard(form.read(_group(args[-1]), args), result, began)
            return result

        return kernel

    def _wait_method(self, original: Any) -> Callable[..., Any]:
        def wait(work: dist.Work, *args: Any, **options: Any) -> Any:
            began = self._mark()
            result = original(work, *args, **options)
            self._waited(work, began)
            return result

        return wait

    def _copy_method(self, name: str, original: Any) -> Callable[..., Any]:
        def copy(courier: CopyStream, source: Tensor, target: Tensor) -> None:
            original(courier, source, target)
            self._copied(name, source)

        return copy

    def _wait_operator(self, before: Any) -> Callable[..., Any]:
        def kernel(keys: Any, tensor: Tensor) -> Any:
            began = self._mark()
            result = before(keys, tensor)
            self._waited(tensor, began)
            return result

        return kernel


def _group(given: Any) -> dist.ProcessGroup:
    """Return the group of a functional operator, which takes its name or itself."""
    if isinstance(given, str):
        return group_named(given)
    return given if isinstance(given, dist.ProcessGroup) else dist.ProcessGroup.unbox(given)
