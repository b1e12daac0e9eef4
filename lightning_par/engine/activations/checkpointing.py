"""Activation checkpointing: blocks keep less of their forward and recompute the rest in the
backward.

B batch, T tokens, D model dim, N heads.

Note [What to keep]: the outputs of matrix products with a weight are kept, since recomputing one
costs about D operations per entry. So are those of attention kernels. Of the products of two
activations, which attention without a kernel computes, the one with the probabilities is kept, and
the scores are not: [B, N, T, T] is larger than the two factors it is computed from, and each entry
costs only the D / N operations of a head. What stands between is elementwise and nearly free.

Note [Sums of products]: of a product whose output is only summed over tensor-parallel ranks, the
sum is kept instead: with sequence parallelism it is a part of the tokens. So neither the product
nor the sum is computed again; other code may use the product, too, and then both are kept. What
has not been kept is full of NaN in the recomputation, which nothing reads. Compiled code keeps the
product, as its compiler asks for each operation before it knows what comes next.

**Source**: Korthikanti et al. 2205.05198, section 4. They keep all of a block but the attention
core; we keep products only, and so recompute norms, activation functions and dropout too.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any, get_args, Literal

import torch
from torch import nn, Tensor
from torch.utils.checkpoint import (
    checkpoint,
    CheckpointPolicy,
    create_selective_checkpoint_contexts,
)

from lightning_par.engine.activations import cpu_offload
from lightning_par.engine.activations.written_buffers import WrittenBuffers
from lightning_par.engine.wrapping import Forward, wrap_forward
from lightning_par.upstream.dispatch import operator_schema, TorchDispatchMode
from lightning_par.upstream.distributed import functional_operators
from lightning_par.upstream.pytree import tree_leaves, tree_map
from lightning_par.upstream.tensor import count_of_changes, detached, storage_key

__all__ = [
    "MODES",
    "Mode",
    "Recomputation",
    "choose_modes",
    "recompute",
    "resolve_operations",
    "wait_on_host",
]

Mode = Literal["full", "none", "selective"]
MODES: tuple[Mode, ...] = get_args(Mode)

_PRODUCTS = ("aten.mm", "aten.addmm", "aten.linear", "aten._grouped_mm", "aten._scaled_mm")
_ATTENTION = (
    "aten._scaled_dot_product_flash_attention",
    "aten._scaled_dot_product_flash_attention_for_cpu",
    "aten._scaled_dot_product_efficient_attention",
    "aten._scaled_dot_product_cudnn_attention",
    "aten._scaled_dot_product_fused_attention_overrideable",
)
_BATCHED = ("aten.bmm", "aten.baddbmm")
_SUMS = (
    functional_operators.reduce_scatter_tensor.default,
    functional_operators.all_reduce.default,
)
_WAIT = functional_operators.wait_tensor.default
_COPIES = (torch.ops.aten.cat.default, torch.ops.aten.clone.default)
_device = torch.ops.prim.device.default

_KEPT_UNITS = {"full": 2, "selective": 22, "none": 34}
"""Bytes that a block of a decoder keeps, in units of T B D, in 16 bits with dropout and an
attention kernel; as the test of GPT-3's shape counts them."""


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """Options of activation checkpointing.

    Attributes:
        mode: ``"full"`` keeps the inputs only, ``"selective"`` also the outputs of `operations`,
            ``"none"`` everything.
        operations: As `resolve_operations` gives them; None: see Note [What to keep].
        parts: Under ``"selective"``: names or patterns of modules inside a block that keep their
            inputs only, while the rest of the block keeps everything; ``"plan"``: those that the
            plan calls checkpointable; None: choose by operation.
        every: Checkpoint every `every`-th block: 0, every, 2 every, ...
        on_host: Whether what is kept is offloaded to the host's memory.
        stage_modes: Modes of the pipeline stages instead of `mode`; ``"auto"``: see
            `choose_modes`.
    """

    mode: Mode
    operations: frozenset[str] | None = None
    parts: tuple[str, ...] | Literal["plan"] | None = None
    every: int = 1
    on_host: bool = False
    stage_modes: tuple[Mode, ...] | Literal["auto"] | None = None


def resolve_operations(names: Sequence[str]) -> tuple[frozenset[str], list[str]]:
    """Return the full names of operations, and those of `names` that do not exist.

    Args:
        names: Such as ``"mm"``, ``"aten.mm"`` or ``"aten.mm.default"``; without an overload, all.
    """
    found, unknown = set(), []
    for name in names:
        space, _, rest = name.partition(".") if "." in name else ("aten", ".", name)
        # torch.ops gives an operator's packet by name, and raises AttributeError without one.
        packet = getattr(getattr(torch.ops, space), rest.partition(".")[0], None)
        overload = rest.partition(".")[2]
        if packet is None or (overload and overload not in packet.overloads()):
            unknown.append(name)
        else:
            found.add(f"{space}.{rest}")
    return frozenset(found), unknown


def choose_modes(in_flight: Sequence[float], blocks: Sequence[int], mode: Mode) -> list[Mode]:
    """Choose for every pipeline rank the least recomputation that needs no more memory than the
    fullest rank does in `mode`.

    Args:
        in_flight: For each rank, the most micro-batches whose activations a block holds at once.
        blocks: Number of blocks of every rank.
        mode: Upper bound of the recomputation.

    >>> choose_modes([4, 3, 2, 1], [1, 1, 1, 1], "selective")
    ['selective', 'selective', 'none', 'none']
    """
    # Memory is proportional to micro-batches in flight times blocks.
    loads = [held * count for held, count in zip(in_flight, blocks, strict=True)]
    budget = max(loads) * _KEPT_UNITS[mode]
    # From the least recomputation to the most.
    order: tuple[Mode, ...] = ("none", "selective", "full")
    allowed = order[: order.index(mode) + 1]
    return [next(m for m in allowed if load * _KEPT_UNITS[m] <= budget) for load in loads]


def recompute(
    module: nn.Module,
    mode: Mode,
    *,
    operations: frozenset[str] | None = None,
    on_host: bool = False,
) -> None:
    """Make `module` recompute its forward in the backward.

    It draws the same random numbers again, and leaves buffers alone. Hooks of the module are not
    called again, since they are outside of its forward.

    Args:
        module: Its `forward` is wrapped; what wraps it later is not recomputed.
        mode: See `Recomputation`; "none" changes nothing.
        operations: See `Recomputation`.
        on_host: Whether the outputs that are kept are offloaded; `wait_on_host` offloads the rest.
    """
    if mode == "none":
        return
    eager: dict[str, Any] = {}
    compiled: dict[str, Any] = {}
    if mode == "selective":
        keeps = partial(_keeps, operations)
        eager = {"context_fn": partial(_keep_and_give, keeps, on_host)}
        # Torch's own contexts, which its compiler knows.
        policy = partial(_policy, keeps)
        compiled = {"context_fn": partial(create_selective_checkpoint_contexts, policy)}
    buffers = WrittenBuffers(module)

    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            # Evaluation keeps nothing for a backward.
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            # By position, so that checkpoint sees every tensor and the devices of them all.
            call: Callable[..., Any] = partial(_call, inner, tuple(kwargs))
            contexts = compiled
            if not torch.compiler.is_compiling():  # a compiler writes to buffers once
                call, contexts = buffers.of_both(call), eager
            return checkpoint(call, *args, *kwargs.values(), use_reentrant=False, **contexts)

        return forward

    wrap_forward(module, around, f"recompute_{mode}")


def _call(inner: Callable[..., Any], names: Sequence[str], *values: Any) -> Any:
    count = len(values) - len(names)
    return inner(*values[:count], **dict(zip(names, values[count:], strict=True)))


def wait_on_host(module: nn.Module) -> None:
    """Offload what autograd saves in the forward of `module`, except parameters, to the host.

    Args:
        module: Its `forward` is wrapped.
    """

    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return inner(*args, **kwargs)
            with cpu_offload.kept_on_host(module.parameters()):
                return inner(*args, **kwargs)

        return forward

    wrap_forward(module, around, "saved_on_host")


def _policy(
    keeps: Callable[[Any, Sequence[Any]], bool],
    context: Any,
    operation: Any,
    *args: Any,
    **kwargs: Any,
) -> CheckpointPolicy:
    kept = keeps(operation, args)
    # MUST_SAVE also where a compiler would rather recompute.
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _keeps(names: frozenset[str] | None, operation: Any, args: Sequence[Any]) -> bool:
    """Return whether the output of an operation is kept; see Note [What to keep]."""
    full, packet = str(operation), str(operation.overloadpacket)
    if names is not None:
        return full in names or packet in names
    # baddbmm has a bias before the two factors.
    if packet in _BATCHED:
        return not _grows(args[-2:])
    return packet in _PRODUCTS or packet in _ATTENTION


def _grows(factors: Sequence[Tensor]) -> bool:
    """Return whether a batched product has more entries than both factors, as scores have."""
    left, right = factors
    product = prod(left.shape[:-1]) * right.shape[-1]
    return product > left.numel() + right.numel()


@dataclass(frozen=True, eq=False)
class _Held:
    """A tensor that is kept on its device.

    Attributes:
        tensor: Without its node, which would hold the tensor for ever.
        changes: How often its memory had been changed.
    """

    tensor: Tensor
    changes: int

    def back(self) -> Tensor:
        """Return the tensor, or raise if it was changed."""
        if count_of_changes(self.tensor) != self.changes:
            raise RuntimeError(
                "Tensor cached during selective activation checkpoint has been mutated"
            )
        return self.tensor.detach()


@dataclass(frozen=True, eq=False)
class _Blank:
    """A tensor that is not kept, as nothing reads it in the recomputation."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def back(self) -> Tensor:
        """Return one with no values, and the same form."""
        made = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)
        return made.fill_(float("nan") if made.is_floating_point() else 0)


class _Output:
    """The outputs of one operation.

    Attributes:
        is_sum: Whether it is a sum over ranks, that nobody has waited for.
        is_summed: Whether it has gone into such a sum, which is kept.
    """

    def __init__(self, out: Any, *, is_sum: bool = False) -> None:
        self.is_sum, self.is_summed = is_sum, False
        self._held = tree_map(_hold, out)

    def keep(self, on_host: bool) -> None:
        """Keep the outputs for the recomputation."""
        if on_host:
            self._held = tree_map(_to_host, self._held)

    def leave_out(self) -> None:
        """Keep their form alone."""
        self._held = tree_map(_blank, self._held)

    def give(self) -> Any:
        """Return the outputs."""
        return tree_map(lambda held: held.back() if hasattr(held, "back") else held, self._held)


def _hold(value: Any) -> Any:
    return _Held(detached(value), count_of_changes(value)) if isinstance(value, Tensor) else value


def _to_host(held: Any) -> Any:
    left = cpu_offload.leave(held.tensor) if isinstance(held, _Held) else held
    return left if isinstance(left, cpu_offload.HostCopy) else held


def _blank(held: Any) -> Any:
    if not isinstance(held, _Held):
        return held
    tensor = held.tensor
    return _Blank(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


_Keeps = Callable[[Any, Sequence[Any]], bool]
_Kept = dict[Any, list[_Output | None]]
"""Operator -> what is kept of each of its calls; None: nothing, it is called again."""


class _Keep(TorchDispatchMode):
    """Runs a forward, and keeps outputs."""

    def __init__(self, keeps: _Keeps, on_host: bool, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps, self._on_host, self._kept = keeps, on_host, kept
        # Outputs that nothing but sums has read so far, by the memory that they, or copies of them,
        # are in; its storage is held, as keys are used again.
        self._unread: dict[int, tuple[Any, list[_Output]]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let code inside that the user has compiled run so, as in torch's modes of this kind."""
        return True

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for output in self._outputs(self._unread):
            output.leave_out() if output.is_summed else output.keep(self._on_host)
        self._unread.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _device:  # by far the most frequent call of a rehearsal
            return args[0].device
        kwargs = kwargs or {}
        read = self._read((args, kwargs)) if self._unread else []
        if read and not _passes_on(func):
            self._settle(read)
            read = []
        out, outputs = func(*args, **kwargs), self._outputs(read)
        if self._keeps(func, args):
            self._follow(out, [self._add(func, out)])
        elif func in _SUMS and outputs:
            for output in outputs:
                output.is_summed = True
            self._follow(out, [self._add(func, out, is_sum=True)])
        elif func is _WAIT and any(output.is_sum for output in outputs):
            for key in read:
                del self._unread[key]
            for output in outputs:
                output.leave_out()
            self._add(func, out).keep(self._on_host)
        elif func in _SUMS or func is _WAIT:
            self._kept[func].append(None)
        elif func in _COPIES and outputs:
            self._follow(out, outputs)
        return out

    def _add(self, func: Any, out: Any, *, is_sum: bool = False) -> _Output:
        output = _Output(out, is_sum=is_sum)
        # In the order of the calls of one operator, which a recomputation repeats.
        self._kept[func].append(output)
        return output

    def _follow(self, out: Any, outputs: list[_Output]) -> None:
        """Watch for what reads `out`, which holds `outputs`."""
        if not _is_plain(out):
            for output in outputs:
                output.keep(self._on_host)
            return
        storage = out.untyped_storage()
        self._unread[storage_key(storage)] = storage, outputs

    def _read(self, values: Any) -> list[int]:
        """Return which unread memory an operation reads."""
        tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
        if not all(map(_is_plain, tensors)):  # a subclass may hold any memory inside
            self._settle(list(self._unread))
        keys = {storage_key(t.untyped_storage()) for t in tensors} if self._unread else ()
        return [key for key in keys if key in self._unread]

    def _outputs(self, keys: Iterable[int]) -> list[_Output]:
        found = {id(output): output for key in keys for output in self._unread[key][1]}
        return list(found.values())

    def _settle(self, keys: Sequence[int]) -> None:
        """Keep the outputs in this memory, which an operation is about to read."""
        for settled in self._outputs(keys):
            settled.keep(self._on_host)
            self._unread = {k: v for k, v in self._unread.items() if settled not in v[1]}


class _Give(TorchDispatchMode):
    """Runs the recomputation, and returns the outputs that were kept, in the same order."""

    def __init__(self, keeps: _Keeps, kept: _Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._keeps, self._kept = keeps, kept
        self._given: dict[Any, int] = defaultdict(int)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """As in the forward."""
        return True

    # Each recomputation of the block begins with the first output.
    def __enter__(self) -> Any:
        self._given.clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _device:
            return args[0].device
        if func in _SUMS or func is _WAIT or self._keeps(func, args):
            index = self._given[func]
            self._given[func] += 1
            output = self._kept[func][index]
            if output is not None:
                return output.give()
        return func(*args, **(kwargs or {}))


def _keep_and_give(keeps: _Keeps, on_host: bool) -> tuple[_Keep, _Give]:
    """Return the contexts of a forward and of its recomputation."""
    kept: _Kept = defaultdict(list)
    return _Keep(keeps, on_host, kept), _Give(keeps, kept)


def _is_plain(value: Any) -> bool:
    return type(value) in (Tensor, nn.Parameter) or hasattr(value, "fake_mode")


@cache
def _passes_on(func: Any) -> bool:
    """Tell whether what an operation returns is a view, a copy or a sum of what it is given."""
    if func in (*_SUMS, _WAIT, *_COPIES, torch.ops.aten._unsafe_view.default):
        return True
    schema = operator_schema(func)
    writes = any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
    return not writes and all(r.alias_info is not None for r in schema.returns)
