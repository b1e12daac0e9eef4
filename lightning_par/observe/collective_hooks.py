"""Hooks on every collective and point-to-point call of this process.

Note [Where calls are hooked]: Python code, FSDP2 and point-to-point call methods of `ProcessGroup`;
DTensor and compiled code call operators of ``_c10d_functional``. While a hook is entered, both are
replaced by wrappers that run the original and then report the call. Compute operators are not
touched, so a step runs as fast as without a hook, on any thread. A `TorchDispatchMode` would
intercept each of them, and would make compiled code recompile.

Note [Interpreter lock]: a worker thread of gloo may need the GIL to free a tensor while it holds
the queue that the next call needs. The original must therefore never run with the GIL held, as it
would if a kernel object were called. The functional operators have one composite kernel for all
backends: redispatching under the key of another backend reaches that kernel, does not come back to
the wrapper, and releases the GIL.

Hooks are process-wide. Several may be entered, and left in any order: they share one set of
wrappers, which goes with the last of them. Communication that C++ code starts by itself, as DDP's
reducer does, is not seen. Copies between device and host are reported where an offloaded optimizer
makes them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.library import Library

from lightning_par.engine.offload.copy_stream import CopyStream
from lightning_par.upstream.dispatch import lazy_keys, remove_kernels
from lightning_par.upstream.distributed import functional_operators, group_named

__all__ = ["Call", "CollectiveHook", "report_functional"]


@dataclass(frozen=True, slots=True)
class Call:
    """One collective or point-to-point call.

    Args:
        operation: ``"all_reduce"``, ``"all_gather"``, ...
        tensors: Tensors whose bytes are counted: one, or any nest of lists and tuples.
        is_part: Whether `tensors` is 1/n of the payload, n being the size of the group.
        group: Process group of the call.
        root: Source or destination rank within the group; None for operations without one.
        splits: Rows of an all-to-all's input that go to each rank (dim 0); empty: equal parts, or
            the input is a list with one tensor per rank.
    """

    operation: str
    tensors: Any
    is_part: bool
    group: dist.ProcessGroup
    root: int | None
    splits: tuple[int, ...]


@dataclass(frozen=True)
class _Signature:
    """Positions of the arguments of a method or an operator that a `Call` needs, group excluded."""

    operation: str
    tensors: int = 0
    is_part: bool = False
    root: int | None = None
    splits: int | None = None

    def bind(self, group: dist.ProcessGroup, args: tuple[Any, ...]) -> Call:
        root = None if self.root is None else args[self.root]
        return Call(
            operation=self.operation,
            tensors=args[self.tensors],
            is_part=self.is_part,
            group=group,
            # Methods of ProcessGroup take the root inside an options object, operators as a number.
            # Both count within the group.
            root=getattr(root, "rootRank", root),
            splits=() if self.splits is None else tuple(args[self.splits]),
        )


# Output first, input second: where the output is the larger tensor (all-gather) argument 0 is the
# payload, where the input is (reduce-scatter), argument 1.
_METHODS: Mapping[str, _Signature] = MappingProxyType(
    {
        "_allgather_base": _Signature("all_gather"),
        "_reduce_scatter_base": _Signature("reduce_scatter", 1),
        "all_gather_single": _Signature("all_gather"),
        "all_gather_single_coalesced": _Signature("all_gather"),
        "all_to_all_single": _Signature("all_to_all", 1, splits=3),
        "allgather": _Signature("all_gather"),
        "allgather_coalesced": _Signature("all_gather"),
        "allgather_into_tensor_coalesced": _Signature("all_gather"),
        "allreduce": _Signature("all_reduce"),
        "allreduce_coalesced": _Signature("all_reduce"),
        "alltoall": _Signature("all_to_all", 1),
        "alltoall_base": _Signature("all_to_all", 1, splits=3),
        "broadcast": _Signature("broadcast", root=1),
        "gather": _Signature("gather", 1, is_part=True, root=2),
        "recv": _Signature("recv"),
        "recv_anysource": _Signature("recv"),
        "reduce": _Signature("reduce", root=1),
        "reduce_scatter": _Signature("reduce_scatter", 1),
        "reduce_scatter_single": _Signature("reduce_scatter", 1),
        "reduce_scatter_single_coalesced": _Signature("reduce_scatter", 1),
        "reduce_scatter_tensor_coalesced": _Signature("reduce_scatter", 1),
        "scatter": _Signature("scatter", is_part=True, root=2),
        "send": _Signature("send"),
    }
)
"""Methods of `ProcessGroup`. Versions of torch differ in which of them exist; those that do not are
skipped.
"""

# Operators get only the input. An all-gather's input is a shard (is_part), a reduce-scatter's is
# the whole tensor.
_OPERATORS: Mapping[str, _Signature] = MappingProxyType(
    {
        "all_gather_into_tensor": _Signature("all_gather", is_part=True),
        "all_gather_into_tensor_coalesced": _Signature("all_gather", is_part=True),
        "all_gather_into_tensor_out": _Signature("all_gather", is_part=True),
        "all_reduce": _Signature("all_reduce"),
        "all_reduce_": _Signature("all_reduce"),
        "all_reduce_coalesced": _Signature("all_reduce"),
        "all_reduce_coalesced_": _Signature("all_reduce"),
        "all_to_all_single": _Signature("all_to_all", splits=2),
        "broadcast": _Signature("broadcast", root=1),
        "broadcast_": _Signature("broadcast", root=1),
        "irecv": _Signature("recv"),
        "isend": _Signature("send"),
        "reduce_scatter_tensor": _Signature("reduce_scatter"),
        "reduce_scatter_tensor_coalesced": _Signature("reduce_scatter"),
        "reduce_scatter_tensor_out": _Signature("reduce_scatter"),
    }
)
"""Operators of ``_c10d_functional``, whose last argument is the group."""

_NAMESPACE = "_c10d_functional"
_OTHER_BACKEND = lazy_keys()
"""Dispatch key of a backend that no tensor here has; see Note [Interpreter lock]."""


class CollectiveHook(ABC):
    """Base of hooks on the collectives of this process; see Note [Where calls are hooked].

    A subclass says what to do at a call (`_on_call`), at a wait for its result (`_on_wait`) and at
    a copy between device and host (`_on_copy`), and when to hook (`_enter`, `_exit`).
    """

    @abstractmethod
    def _mark(self) -> Any:
        """Return a time mark of now, as `Clock.mark` does."""

    @abstractmethod
    def _on_call(self, call: Call, result: Any, began: Any) -> None:
        """Take note of a collective or point-to-point call that has just returned.

        Args:
            call: Its operation, tensors and group.
            result: What the caller waits on: a `Work`, or the output tensors.
            began: Mark taken right before the call.
        """

    @abstractmethod
    def _on_wait(self, awaited: dist.Work | Tensor, began: Any) -> None:
        """Take note of a wait of this rank that has just ended.

        Args:
            awaited: The `Work`, or the output tensor of a functional collective.
            began: Mark taken right before the wait.
        """

    @abstractmethod
    def _on_copy(self, operation: str, tensor: Tensor) -> None:
        """Take note of a copy between device and host.

        Args:
            operation: ``"to_host"`` or ``"to_device"``.
            tensor: Source of the copy.
        """

    def _enter(self) -> None:
        _WRAPPERS.add(self)

    def _exit(self) -> None:
        _WRAPPERS.remove(self)


class _Wrappers:
    """The wrappers of all calls, which report to every hook that is entered."""

    def __init__(self) -> None:
        self._hooks: tuple[CollectiveHook, ...] = ()
        self._library: Library | None = None
        self._replaced: list[tuple[type, str, Any]] = []

    def add(self, hook: CollectiveHook) -> None:
        """Report calls to `hook` from now on, too."""
        if not self._hooks:
            self._install()
        self._hooks = (*self._hooks, hook)

    def remove(self, hook: CollectiveHook) -> None:
        """Report nothing to `hook` any more."""
        self._hooks = tuple(other for other in self._hooks if other is not hook)
        if not self._hooks:
            self._uninstall()

    def _install(self) -> None:
        for name, signature in _METHODS.items():
            # `vars` and not `hasattr`: what is inherited would be put on the class itself.
            if name in vars(dist.ProcessGroup):
                self._patch(dist.ProcessGroup, name, partial(self._wrap_method, signature))
        # Python sees the works of all C++ backends as `Work`, so that one patch is for all.
        self._patch(dist.Work, "wait", self._wrap_wait_method)
        for name in ("to_host", "to_device"):
            self._patch(CopyStream, name, partial(self._wrap_copy, name))
        self._library = Library(_NAMESPACE, "IMPL")
        # The keys at which a real tensor dispatches; fake and meta tensors come by `report`.
        for key in ("CPU", "CUDA"):
            for name, signature in _OPERATORS.items():
                if hasattr(functional_operators, name):
                    self._implement(name, key, partial(self._wrap_operator, signature))
            self._implement("wait_tensor", key, self._wrap_wait_operator)

    def _uninstall(self) -> None:
        # Backwards: of a method that was patched twice the first original is put back last.
        for owner, name, original in reversed(self._replaced):
            setattr(owner, name, original)
        self._replaced = []
        assert self._library is not None
        # At once, and not when the library is collected: a hook may be entered before that.
        remove_kernels(self._library)
        self._library = None

    def _patch(self, owner: type, name: str, wrap: Callable[[Any], Any]) -> None:
        """Replace a method of a class by a wrapper of it."""
        # vars() gives the raw descriptor of pybind, which has to be put back: it binds `self`.
        # getattr() gives what the wrapper can call with the instance as first argument.
        self._replaced.append((owner, name, vars(owner)[name]))
        setattr(owner, name, wrap(getattr(owner, name)))

    def _implement(self, name: str, key: str, wrap: Callable[[Any], Any]) -> None:
        """Register a wrapper of an operator's kernel for one dispatch key."""
        assert self._library is not None
        operator = getattr(functional_operators, name).default

        # See Note [Interpreter lock].
        def composite(_: Any, *args: Any, **options: Any) -> Any:
            return operator.redispatch(_OTHER_BACKEND, *args, **options)

        self._library.impl(name, wrap(composite), key, with_keyset=True)

    def report(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        """Report the call of an operator that no kernel of ours has seen."""
        call = _OPERATORS[name].bind(_as_group(args[-1]), args)
        for hook, began in self._marks():
            hook._on_call(call, result, began)

    def _marks(self) -> list[tuple[CollectiveHook, Any]]:
        return [(hook, hook._mark()) for hook in self._hooks]

    def _wrap_method(self, signature: _Signature, original: Any) -> Callable[..., Any]:
        def method(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
            # Before the call, for every hook: its own clock may be a CUDA event.
            marks = self._marks()
            work = original(group, *args, **options)
            # torch's own callers pass keywords in the order of the parameters.
            call = signature.bind(group, (*args, *options.values()))
            for hook, began in marks:
                hook._on_call(call, work, began)
            return work

        return method

    def _wrap_operator(self, signature: _Signature, original: Any) -> Callable[..., Any]:
        def kernel(keys: Any, *args: Any, **options: Any) -> Any:
            marks = self._marks()
            result = original(keys, *args, **options)
            call = signature.bind(_as_group(args[-1]), args)
            for hook, began in marks:
                # Outside of the original, so that a hook that raises leaves no collective half
                # done.
                hook._on_call(call, result, began)
            return result

        return kernel

    def _wrap_wait_method(self, original: Any) -> Callable[..., Any]:
        def wait(work: dist.Work, *args: Any, **options: Any) -> Any:
            marks = self._marks()
            result = original(work, *args, **options)
            for hook, began in marks:
                hook._on_wait(work, began)
            return result

        return wait

    def _wrap_copy(self, name: str, original: Any) -> Callable[..., Any]:
        # Only that there was one, and its size: the copy has a stream of its own to be timed on.
        def copy(stream: CopyStream, source: Tensor, target: Tensor) -> None:
            original(stream, source, target)
            for hook in self._hooks:
                hook._on_copy(name, source)

        return copy

    def _wrap_wait_operator(self, original: Any) -> Callable[..., Any]:
        def kernel(keys: Any, tensor: Tensor) -> Any:
            marks = self._marks()
            result = original(keys, tensor)
            for hook, began in marks:
                hook._on_wait(tensor, began)
            return result

        return kernel


_WRAPPERS = _Wrappers()


def report_functional(name: str, args: tuple[Any, ...], result: Any) -> None:
    """Report a call of a functional collective to every hook that is entered.

    For tensors without memory, which reach no kernel of a device and so none of the wrappers.

    Args:
        name: Name of the operator in ``_c10d_functional``; ``wait_tensor`` is no call.
        args: Its arguments, the group last.
        result: What it gave.
    """
    if name in _OPERATORS:
        _WRAPPERS.report(name, args, result)


def _as_group(given: Any) -> dist.ProcessGroup:
    """Return the group of a functional operator, given by its name, boxed, or as it is."""
    if isinstance(given, str):
        return group_named(given)
    return given if isinstance(given, dist.ProcessGroup) else dist.ProcessGroup.unbox(given)
