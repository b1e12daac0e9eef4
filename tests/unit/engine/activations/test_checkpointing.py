"""What a block keeps and recomputes: the same gradients, and counted bytes and operations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lightning_par.engine.activations import cpu_offload
from lightning_par.engine.activations.checkpointing import (
    choose_modes,
    Mode,
    recompute,
    resolve_operations,
    wait_on_host,
)
from lightning_par.models.gpt.config import GPTConfig
from lightning_par.models.gpt.model import Block

TOKENS, WIDTH, HEADS = 2048, 12288, 96  # GPT-3
UNIT = TOKENS * WIDTH  # bytes, at a batch of 1


class Live(TorchDispatchMode):
    """Counts the bytes on meta of the tensors made inside that are still held."""

    def __init__(self, *apart: Tensor) -> None:
        super().__init__()
        self.apart = {tensor.untyped_storage()._cdata for tensor in apart}
        self.seen: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = self.apart | {ref.cdata for ref, _ in self.seen if not ref.expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "meta":
                storage = tensor.untyped_storage()
                if storage._cdata not in known:
                    self.seen.append((StorageWeakRef(storage), storage.nbytes()))
        return out

    @property
    def bytes(self) -> int:
        return sum(size for ref, size in self.seen if not ref.expired())


@contextmanager
def saved_bytes(apart: nn.Module) -> Iterator[dict[int, int]]:
    """Count what autograd saves with saved-tensor hooks: memory -> bytes, without parameters."""
    found: dict[int, Any] = {}
    own = {p.untyped_storage()._cdata for p in apart.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage  # held, so that no other memory gets its address
        return tensor

    sizes: dict[int, int] = {}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes
    sizes.update({key: storage.nbytes() for key, storage in found.items()})


def with_scores(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    """Attention that writes its scores down."""
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    weights = F.dropout(scores.masked_fill(later, float("-inf")).softmax(-1), 0.1)
    return weights @ value


def with_kernel(query: Tensor, key: Tensor, value: Tensor, **_: Any) -> Tensor:
    """Flash attention, which has shapes on meta too."""
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    return attend(query, key, value, 0.1, True)[0]


def fused_dropout(x: Tensor, p: float = 0.5, training: bool = True, _: bool = False) -> Tensor:
    """Dropout as on a GPU, which keeps one byte per entry."""
    return torch.native_dropout(x, p, training)[0]


@contextmanager
def kernels(attention: Callable[..., Tensor]) -> Iterator[None]:
    """Let the models use these instead of what meta has."""
    attends = patch.object(F, "scaled_dot_product_attention", attention)
    with attends, patch.object(F, "dropout", fused_dropout):
        yield


def gpt3_block(mode: Mode) -> Block:
    config = GPTConfig(
        vocab_size=8,
        max_length=TOKENS,
        num_layers=1,
        model_dim=WIDTH,
        num_heads=HEADS,
        ff_dim=4 * WIDTH,
        dropout=0.1,
        positions="learned",
        activation="gelu",
        norm="layernorm",
        bias=True,
    )
    with torch.device("meta"):
        block = Block(config).to(torch.float16)
    recompute(block, mode)
    return block


def measure(mode: Mode, attention: Callable[..., Tensor]) -> tuple[int, int, int]:
    """Give the bytes kept by one block, and the operations of forward and backward."""
    block = gpt3_block(mode)
    x = torch.empty(1, TOKENS, WIDTH, dtype=torch.float16, device="meta", requires_grad=True)
    with kernels(attention):
        forward, backward, live = (
            FlopCounterMode(display=False),
            FlopCounterMode(display=False),
            Live(x, *block.parameters()),
        )
        with forward, live:
            y = block(x)
        kept = live.bytes - y.nbytes + x.nbytes  # y is the next block's input
        with backward:
            y.sum().backward()
    return kept, forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("attention", [with_scores, with_kernel])
def test_full_keeps_the_input_of_a_block_only(attention: Callable[..., Tensor]) -> None:
    kept, forward, backward = measure("full", attention)
    _, whole, alone = measure("none", attention)
    assert kept == 2 * UNIT
    assert forward == whole
    assert 0.9 < (backward - alone) / forward <= 1


@pytest.mark.parametrize(
    ("attention", "less", "again"), [(with_scores, 0.65, 0.05), (with_kernel, 0.35, 0.02)]
)
def test_selective_keeps_much_less_and_recomputes_little(
    attention: Callable[..., Tensor], less: float, again: float
) -> None:
    everything, forward, alone = measure("none", attention)
    kept, _, backward = measure("selective", attention)
    assert 1 - kept / everything >= less
    assert 0 <= (backward - alone) / forward < again
    assert kept == pytest.approx(22 * UNIT, rel=0.01)  # what choose_modes goes by


@pytest.mark.parametrize(("attention", "units"), [(with_scores, 114), (with_kernel, 34)])
def test_live_bytes_are_those_that_hooks_count(
    attention: Callable[..., Tensor], units: int
) -> None:
    """Without recomputation autograd holds all there is; see Korthikanti et al.: 34 + 5 N T / D."""
    block = gpt3_block("none")
    x = torch.empty(1, TOKENS, WIDTH, dtype=torch.float16, device="meta", requires_grad=True)
    with kernels(attention), saved_bytes(block) as sizes:
        block(x)
    kept, _, _ = measure("none", attention)
    assert sum(sizes.values()) == pytest.approx(kept, rel=0.001)
    assert kept == pytest.approx(units * UNIT, rel=0.02)


class Dropping(nn.Module):
    """Draws random numbers, and takes its input by name or by place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 5)
        self.calls = 0

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        self.calls += 1
        y = F.dropout(F.gelu(self.first(x)), 0.5, self.training) + shift
        return x + F.dropout(self.second(y), 0.3, self.training)


def gradients(module: Dropping, *, by_name: bool = False) -> list[Tensor]:
    torch.manual_seed(3)
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    y = module(shift=0.5, x=x) if by_name else module(x, shift=0.5)
    y = module(y).square().sum()  # twice: each call has its own random numbers
    torch.rand(2)  # moves the generator on
    y.backward()
    assert x.grad is not None
    return [y.detach(), torch.rand(1), x.grad, *(p.grad for p in module.parameters())]


def build(mode: Mode, **options: Any) -> Dropping:
    torch.manual_seed(1)
    module = Dropping().double()
    recompute(module, mode, **options)
    return module


@pytest.mark.parametrize("by_name", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_dropout_is_that_of_the_forward(mode: Mode, on_host: bool, by_name: bool) -> None:
    plain, module = build("none"), build(mode, on_host=on_host)
    if on_host:
        wait_on_host(module)
    wanted, got = gradients(plain, by_name=by_name), gradients(module, by_name=by_name)
    assert all(map(torch.equal, got, wanted))
    assert (plain.calls, module.calls) == (2, 4)


def test_nothing_is_recomputed_without_gradients() -> None:
    module = build("full")
    with torch.no_grad():
        module(torch.zeros(2, 5, dtype=torch.float64))
    assert module.calls == 1


def test_chosen_operations_are_not_run_again() -> None:
    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.names.append(str(func.overloadpacket))
            return func(*args, **(kwargs or {}))

    counts = {}
    for name in ("addmm", "gelu"):
        operations, unknown = resolve_operations([name])
        assert not unknown
        module = build("selective", operations=operations)
        y = module(torch.randn(3, 5, dtype=torch.float64, requires_grad=True)).sum()
        with Count() as count:
            y.backward()
        counts[name] = [count.names.count(f"aten.{n}") for n in ("addmm", "gelu")]
    assert counts["addmm"][0] == 0
    assert counts["addmm"][1] == 1
    assert counts["gelu"][0] >= 1
    assert counts["gelu"][1] == 0


@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_what_is_kept_goes_to_the_host_and_parameters_stay(mode: Mode) -> None:
    """On a CPU the way is short; what would take it is the same."""
    module, sent, back = build(mode, on_host=True), [], []
    leave, give = cpu_offload._leave, cpu_offload._return

    def watch(tensor: Any, stays: frozenset[int] = frozenset()) -> Any:
        if cpu_offload._memory(tensor) not in stays:
            sent.append(tuple(tensor.shape))
        return leave(tensor, stays)

    def see(held: Any) -> Any:
        back.append(held)
        return give(held)

    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    with patch.object(cpu_offload, "_leave", watch), patch.object(cpu_offload, "_return", see):
        wait_on_host(module)
        module(x).sum().backward()
    assert (3, 5) in sent
    assert ((3, 7) in sent) == (mode != "full")
    assert not {(7, 5), (5, 7)} & set(sent)
    assert back


def test_operations_are_found_by_any_of_their_names() -> None:
    names = ["mm", "aten.bmm", "aten.addmm.default", "nonsense", "aten.mm.what", "no.such"]
    found, unknown = resolve_operations(names)
    assert found == {"aten.mm", "aten.bmm", "aten.addmm.default"}
    assert unknown == ["nonsense", "aten.mm.what", "no.such"]


@pytest.mark.parametrize(
    ("in_flight", "blocks", "mode", "wanted"),
    [
        ([4, 3, 2, 1], [1] * 4, "full", ["full", "full", "full", "full"]),
        ([4, 4, 2, 1], [4, 3, 4, 2], "selective", ["selective", "selective", "none", "none"]),
        ([32, 16, 2, 1], [1] * 4, "full", ["full", "full", "selective", "none"]),
        ([2, 1], [1, 3], "selective", ["selective", "selective"]),
        ([2, 1], [1, 1], "none", ["none", "none"]),
    ],
)
def test_later_stages_recompute_less(
    in_flight: list[float], blocks: list[int], mode: Mode, wanted: list[Mode]
) -> None:
    assert choose_modes(in_flight, blocks, mode) == wanted
