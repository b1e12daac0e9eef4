"""Logits that are sharded over the vocabulary are, to any code, the whole logits."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

from lightning_par.engine.collectives import split_sizes
from lightning_par.engine.tensor.vocab_parallel import VocabShardedLogits
from lightning_par.errors import ConfigurationError
from tests.support.ranks.api import ranks

B, T = 2, 5
IGNORED = -100


def logits(vocab, *shape):
    generator = torch.Generator().manual_seed(vocab)
    return torch.randn(*(shape or (B, T)), vocab, dtype=torch.float64, generator=generator) * 3


def labels(vocab):
    generator = torch.Generator().manual_seed(9)
    found = torch.randint(0, vocab, (B, T), generator=generator)
    found[0, 1] = found[1, 3] = IGNORED
    return found


def sharded(whole, rank, world):
    """The leaf of this rank and its wrapper."""
    sizes = split_sizes(whole.shape[-1], world)
    local = whole.split(sizes, -1)[rank].clone().requires_grad_()
    return local, VocabShardedLogits.wrap(local, whole.shape[-1], dist.group.WORLD)


def gathers(mode):
    return sum(n for op, n in mode.get_comm_counts().items() if "gather" in op.__name__)


def compare(function, vocab, rank, world, *, gathered):
    """Values and gradients equal those of the plain tensor; says whether anything was gathered."""
    whole = logits(vocab).requires_grad_()
    want = function(whole)
    local, mine = sharded(whole.detach(), rank, world)
    with CommDebugMode() as mode:
        got = function(mine)
    assert gathers(mode) == gathered
    assert not isinstance(got, VocabShardedLogits)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12, equal_nan=True)
    if isinstance(want, torch.Tensor) and want.requires_grad:
        want.nan_to_num().sum().backward()
        got.nan_to_num().sum().backward()
        cut = whole.grad.split(split_sizes(vocab, world), -1)[rank]
        torch.testing.assert_close(local.grad, cut, rtol=0, atol=1e-12)


def flat(x):
    return labels(x.size(-1)).flatten()


SHAPES = {
    "view": lambda x: F.cross_entropy(x.view(-1, x.size(-1)), flat(x)),
    "view by size": lambda x: F.cross_entropy(x.view(B * T, -1), flat(x)),
    "view of a tuple": lambda x: F.cross_entropy(x.view((-1, x.shape[-1])), flat(x)),
    "reshape": lambda x: F.cross_entropy(x.reshape(B * T, x.shape[2]), flat(x)),
    "torch.reshape": lambda x: F.cross_entropy(torch.reshape(x, (-1, x.shape[2])), flat(x)),
    "flatten": lambda x: F.cross_entropy(x.flatten(0, 1), flat(x)),
    "flatten to the last but one": lambda x: F.cross_entropy(x.flatten(0, -2), flat(x)),
    "slice": lambda x: F.cross_entropy(
        x[:, :-1].reshape(-1, x.size(-1)), labels(x.size(-1))[:, 1:].reshape(-1)
    ),
    "slice with ellipsis": lambda x: F.cross_entropy(
        x[..., :-1, :].contiguous().view(-1, x.size(-1)), labels(x.size(-1))[:, 1:].flatten()
    ),
    "slice of all dims": lambda x: F.cross_entropy(x[:, 2, :], labels(x.size(-1))[:, 2]),
    "one token": lambda x: F.cross_entropy(x[1, 2], labels(x.size(-1))[1, 2]),
    "transpose": lambda x: F.cross_entropy(x.transpose(1, 2), labels(x.size(-1))),
    "transpose from the end": lambda x: F.cross_entropy(x.transpose(-1, -2), labels(x.size(-1))),
    "float": lambda x: F.cross_entropy(x.float().double().flatten(0, 1), flat(x)),
    "to": lambda x: F.cross_entropy(x.to(torch.float64).flatten(0, 1), flat(x)),
    "module": lambda x: nn.CrossEntropyLoss().forward(x.flatten(0, 1), flat(x)),
    "keywords": lambda x: F.cross_entropy(input=x.flatten(0, 1), target=flat(x)),
    "sum": lambda x: F.cross_entropy(x.flatten(0, 1), flat(x), reduction="sum"),
    "none": lambda x: F.cross_entropy(x.transpose(1, 2), labels(x.size(-1)), reduction="none"),
    "ignore_index": lambda x: F.cross_entropy(
        x.flatten(0, 1), flat(x).clamp(min=1), ignore_index=1
    ),
    "smoothing": lambda x: F.cross_entropy(x.flatten(0, 1), flat(x), label_smoothing=0.3),
    "smoothing summed": lambda x: F.cross_entropy(
        x.transpose(1, 2), labels(x.size(-1)), label_smoothing=0.3, reduction="sum"
    ),
    "all ignored": lambda x: F.cross_entropy(x.flatten(0, 1), flat(x) * 0 + IGNORED),
    "all ignored summed": lambda x: F.cross_entropy(
        x.flatten(0, 1), flat(x) * 0 + IGNORED, reduction="sum"
    ),
    "scaled": lambda x: F.cross_entropy(x.flatten(0, 1), flat(x)) * 3,
}


@ranks(3)
@pytest.mark.parametrize("case", SHAPES)
def test_cross_entropy_never_gathers_and_equals_one_process(rank, world, case):
    for vocab in (7, 4, 6):  # columns 3 3 1, 2 2 0, 2 2 2
        compare(SHAPES[case], vocab, rank, world, gathered=0)


def accuracy(x):
    """As torchmetrics takes it: arg-max, and a comparison with the labels where they count."""
    target = labels(x.size(-1))
    return (x.argmax(-1) == target)[target != IGNORED].float().mean()


class Squares(torch.autograd.Function):
    """A function as users write them: torch calls no ``__torch_function__`` for its `apply`."""

    @staticmethod
    def forward(ctx, x):
        twice = x * 2
        ctx.save_for_backward(twice)
        return twice * twice / 4

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0]


OTHERS = {
    "a function of autograd": lambda x: Squares.apply(x),
    "argmax": lambda x: x.argmax(-1),
    "torch.argmax": lambda x: torch.argmax(x, dim=-1),
    "accuracy": accuracy,
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax and gather": lambda x: x.log_softmax(-1).gather(
        -1, labels(x.size(-1)).clamp(min=0).unsqueeze(-1)
    ),
    "z-loss": lambda x: x.logsumexp(-1).square().mean(),
    "plus": lambda x: x + 2,
    "tensor plus": lambda x: torch.ones(x.shape, dtype=x.dtype) + x,
    "divided by a temperature": lambda x: (x / 0.7).sin(),
    "matrix product": lambda x: x @ torch.ones(x.shape[-1], 3, dtype=x.dtype),
    "top-k": lambda x: x.topk(2, dim=-1).values,
    "mask": lambda x: x[labels(x.size(-1)) != IGNORED],
    "a column": lambda x: x[..., 0],
    "columns": lambda x: x[..., :-1],
    "columns before an ellipsis": lambda x: x[:, :, :3, ...],
    "new dim": lambda x: x[None],
    "flattened": lambda x: x.flatten(),
    "view that ends in another size": lambda x: x.view(B, -1),
    "view as another dtype": lambda x: x.detach().view(torch.int64),
    "permute": lambda x: F.cross_entropy(x.permute(0, 2, 1), labels(x.size(-1))),
    "class weights": lambda x: F.cross_entropy(
        x.flatten(0, 1), flat(x), torch.arange(1.0, x.size(-1) + 1, dtype=x.dtype)
    ),
    "probabilities": lambda x: F.cross_entropy(
        x.flatten(0, 1), torch.full((B * T, x.size(-1)), 0.3, dtype=x.dtype)
    ),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()),
    "item": lambda x: x[0, 0].sum().item(),
    "cat": lambda x: torch.cat([torch.zeros(x.shape, dtype=x.dtype), x]),
    "max in a list": lambda x: max(x.flatten().tolist()),
}


@ranks(3)
@pytest.mark.parametrize("case", OTHERS)
def test_any_other_operation_gathers_once_and_equals_one_process(rank, world, case):
    compare(OTHERS[case], 7, rank, world, gathered=1)


@ranks(2)
def test_shape_and_type_are_those_of_the_whole_without_communication(rank, world):
    _, x = sharded(logits(7), rank, world)
    with CommDebugMode() as mode:
        assert x.shape == (B, T, 7)
        assert (x.size(1), x.dim(), x.ndim, x.numel(), len(x)) == (T, 3, 3, 70, B)
        assert (x.dtype, x.device.type, x.requires_grad) == (torch.float64, "cpu", True)
        assert x.is_floating_point()
        assert not x.is_inference()
        assert not x.detach().requires_grad
        columns = split_sizes(7, 2)[rank]
        assert repr(x) == f"VocabShardedLogits(shape=(2, 5, 7), local=(2, 5, {columns}))"
    assert mode.get_total_counts() == 0


@ranks(2)
def test_cross_entropy_communicates_two_all_reduces_forward_and_nothing_backward(rank, world):
    _, x = sharded(logits(7), rank, world)
    with CommDebugMode() as ahead:
        loss = F.cross_entropy(x.flatten(0, 1), flat(x))
    with CommDebugMode() as behind:
        loss.backward()
    counts = {op.__name__: n for op, n in ahead.get_comm_counts().items()}
    assert counts == {"all_reduce": 2}
    assert behind.get_total_counts() == 0


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(rank, world, dtype):
    whole = logits(7).to(dtype)
    _, x = sharded(whole, rank, world)
    loss = F.cross_entropy(x.flatten(0, 1), flat(x))
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(whole.float().flatten(0, 1), flat(whole)))


@ranks(2)
def test_large_logits_do_not_overflow(rank, world):
    whole = logits(7) * 1e4
    _, x = sharded(whole, rank, world)
    want = F.cross_entropy(whole.flatten(0, 1), flat(whole))
    torch.testing.assert_close(F.cross_entropy(x.flatten(0, 1), flat(x)), want)


@ranks(2)
@pytest.mark.parametrize("target", [7, -3])
def test_a_target_outside_of_the_vocabulary_is_refused_as_in_torch(rank, world, target):
    wrong = labels(7)
    wrong[0, 2] = target
    _, x = sharded(logits(7), rank, world)
    with pytest.raises(IndexError, match=rf"Target {target} is out of bounds"):
        F.cross_entropy(logits(7).flatten(0, 1), wrong.flatten())
    with pytest.raises(IndexError, match=rf"Target {target} is out of bounds"):
        F.cross_entropy(x.flatten(0, 1), wrong.flatten())


@ranks(2)
def test_a_reduction_that_does_not_exist_is_refused_as_in_torch(rank, world):
    _, x = sharded(logits(7), rank, world)
    with pytest.raises(ValueError, match="average is not a valid value for reduction"):
        F.cross_entropy(x.flatten(0, 1), flat(x), reduction="average")


@ranks(2)
def test_a_change_in_place_is_refused_and_not_lost(rank, world):
    _, x = sharded(logits(7).requires_grad_(False), rank, world)
    changes = {
        "mul_": lambda: x.mul_(2),
        "masked_fill_": lambda: x.masked_fill_(labels(7).unsqueeze(-1) == 0, 0),
        "__setitem__": lambda: x.__setitem__((0, 0), 5.0),
    }
    for name, change in changes.items():
        with pytest.raises(ConfigurationError, match=rf"^{name} is an in-place .*new tensor"):
            change()
