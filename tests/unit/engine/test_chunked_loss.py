"""The cross-entropy of a linear head in chunks is that of whole logits, without whole logits."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, Tensor

from lightning_par import linear_cross_entropy
from lightning_par.engine.tensor.chunked_logits import (
    chunked_logits,
    ChunkedLogits,
    LossOptions,
)
from lightning_par.errors import ConfigurationError
from lightning_par.models.gpt.config import GPTConfig
from lightning_par.models.gpt.model import GPT
from lightning_par.observe.cross_entropies import LookAtLosses
from lightning_par.observe.live_bytes import LiveBytes
from lightning_par.observe.recorder import trace_forward

B, T, D, V = 3, 7, 5, 37
IGNORED = -100
CLASS_WEIGHTS = torch.linspace(0, 2, V, dtype=torch.float64)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "soft cap": {"soft_cap": 3.0},
    "class weights": {"class_weights": CLASS_WEIGHTS},
    "all": {
        "label_smoothing": 0.2,
        "z_loss": 0.1,
        "soft_cap": 2.0,
        "class_weights": CLASS_WEIGHTS,
    },
}


def tensors(bias: bool = True, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Hidden states, weight and bias."""
    torch.manual_seed(1)
    shapes = [(B, T, D), (V, D), *([(V,)] if bias else [])]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


def some_labels() -> Tensor:
    labels = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(2))
    labels[0, 1] = labels[2, 6] = IGNORED
    return labels


def whole_loss(
    given: list[Tensor],
    labels: Tensor,
    *,
    reduction: str,
    class_weights: Tensor | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
) -> Tensor:
    logits = F.linear(*given)
    logits = logits if soft_cap is None else soft_cap * torch.tanh(logits / soft_cap)
    each = F.cross_entropy(
        logits.movedim(-1, 1),
        labels,
        class_weights,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    counts = (labels != IGNORED).to(logits.dtype)
    if class_weights is not None:
        counts = counts * class_weights[labels.clamp(min=0)]
    each = each + z_loss * counts * logits.logsumexp(-1).square()
    return {"none": each, "sum": each.sum(), "mean": each.sum() / counts.sum()}[reduction]


@pytest.mark.parametrize("chunk_size", [1, 4, 21, None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_loss_and_gradients_are_those_of_whole_logits(
    case: dict[str, Any], reduction: Any, chunk_size: int | None
) -> None:
    given, labels = tensors(), some_labels()
    want = whole_loss(given, labels, reduction=reduction, **case)
    hidden, weight, bias = given
    options: dict[str, Any] = {**case, "reduction": reduction, "chunk_size": chunk_size}
    got = linear_cross_entropy(hidden, weight, labels, bias=bias, **options)
    factor = torch.rand_like(want)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    found, wanted = (torch.autograd.grad(loss, given, factor) for loss in (got, want))
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_a_head_may_be_given_and_a_whole_loss_keeps_its_value_without_gradients() -> None:
    hidden, weight = tensors(bias=False)
    head = nn.Linear(D, V, bias=False, dtype=torch.float64)
    head.weight = nn.Parameter(weight.detach())
    with torch.no_grad():
        got = linear_cross_entropy(hidden, head, some_labels(), chunk_size=4)
    torch.testing.assert_close(got, whole_loss([hidden, weight], some_labels(), reduction="mean"))
    assert not got.requires_grad


def test_only_what_is_trained_gets_a_gradient() -> None:
    hidden, weight = tensors(bias=False)
    loss = linear_cross_entropy(hidden, weight.detach(), some_labels(), chunk_size=4)
    want = whole_loss([hidden, weight], some_labels(), reduction="mean")
    torch.testing.assert_close(
        torch.autograd.grad(loss, hidden), torch.autograd.grad(want, hidden), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_any_label_the_loss_is_as_in_torch_and_the_gradients_are_zero(
    reduction: Any,
) -> None:
    hidden, weight = tensors(bias=False)
    labels = torch.full((B, T), IGNORED)
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk_size=4)
    logits = F.linear(hidden, weight).flatten(0, 1)
    want = F.cross_entropy(logits, labels.flatten(), reduction=reduction)
    torch.testing.assert_close(loss, want, equal_nan=True)
    for grads in (torch.autograd.grad(x, [hidden, weight]) for x in (loss, want)):
        assert all(not grad.any() for grad in grads)


def test_a_label_outside_of_the_vocabulary_is_refused_as_in_torch() -> None:
    hidden, weight = tensors(bias=False)
    with pytest.raises(IndexError, match=f"Target {V} is out of bounds"):
        linear_cross_entropy(hidden, weight, torch.full((B, T), V))


def test_predictions_are_the_most_likely_classes() -> None:
    hidden, weight, bias = tensors()
    options: Any = {"bias": bias, "return_predictions": True, "chunk_size": 4}
    loss, best = linear_cross_entropy(hidden, weight, some_labels(), reduction="none", **options)
    assert loss.shape == best.shape == (B, T)
    assert torch.equal(best, F.linear(hidden, weight, bias).argmax(-1))


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_more_logits_are_there_than_those_of_a_chunk(reduction: Any) -> None:
    hidden = torch.randn(512, 8, requires_grad=True)
    weight = torch.randn(4096, 8, requires_grad=True)
    labels = torch.randint(0, 4096, (512,))

    def peak(loss: Any) -> int:
        with LiveBytes(besides=[hidden, weight, labels]) as live:
            loss().sum().backward()
        hidden.grad = weight.grad = None
        return live.peak

    whole = peak(lambda: F.cross_entropy(F.linear(hidden, weight), labels, reduction=reduction))
    in_chunks = peak(
        lambda: linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk_size=32)
    )
    assert whole > 2 * 512 * 4096 * 4
    # Gradients, those of a sum and the same times a factor, and logits once.
    assert in_chunks < 2 * (512 + 4096) * 8 * 4 + 1.5 * 32 * 4096 * 4


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_bfloat16_is_as_close_to_float64_as_whole_logits_are(reduction: Any) -> None:
    torch.manual_seed(3)
    sizes = [(512, 64), (999, 64)]
    exact = [torch.randn(s, dtype=torch.float64).bfloat16().double() / 4 for s in sizes]
    labels = torch.randint(0, 999, (512,))

    def run(dtype: torch.dtype, *, chunked: bool) -> list[Tensor]:
        given = [t.to(dtype).requires_grad_() for t in exact]
        if chunked:
            loss = linear_cross_entropy(
                given[0], given[1], labels, reduction=reduction, chunk_size=64
            )
        else:
            logits = F.linear(*given)
            logits = logits.float() if dtype == torch.bfloat16 else logits
            loss = F.cross_entropy(logits, labels, reduction=reduction)
        loss = loss if reduction == "mean" else loss.mean()
        return [loss.detach(), *torch.autograd.grad(loss, given)]

    want = run(torch.float64, chunked=False)
    whole, in_chunks = (run(torch.bfloat16, chunked=chunked) for chunked in (False, True))
    for got, other, exactly in zip(in_chunks, whole, want, strict=True):
        error, bound = ((x.double() - exactly).norm() for x in (got, other))
        assert error <= bound + 1e-6 * exactly.norm()  # float32 adds in another order


def test_the_loss_can_be_differentiated_again_and_its_gradients_cannot() -> None:
    hidden, weight = tensors(bias=False)
    loss = linear_cross_entropy(hidden, weight, some_labels(), chunk_size=4)
    first, second = (
        torch.autograd.grad(loss * factor, weight, retain_graph=True)[0] for factor in (1, 3)
    )
    torch.testing.assert_close(second, 3 * first)
    (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
    with pytest.raises(ConfigurationError, match="gradient of a gradient"):
        grad.sum().backward()


def test_autocast_computes_in_its_dtype_and_gives_gradients_in_that_of_the_weights() -> None:
    given = [t.detach().float().requires_grad_() for t in tensors()]
    hidden, weight, bias = given
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_cross_entropy(hidden, weight, some_labels(), bias=bias, chunk_size=4)
        want = F.cross_entropy(F.linear(*given).float().flatten(0, 1), some_labels().flatten())
    torch.testing.assert_close(got, want)
    pairs = zip(*(torch.autograd.grad(loss, given) for loss in (got, want)), strict=True)
    for found, wanted in pairs:
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.002)


def some_logits(**changes: Any) -> tuple[ChunkedLogits, Tensor]:
    """Logits in chunks, and the whole ones."""
    hidden, weight, bias = tensors()
    head = nn.Linear(D, V, dtype=torch.float64)
    head.weight, head.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
    options = LossOptions(chunk_size=4, **changes)
    return chunked_logits(hidden, head, options=options), head(hidden)


ANY: dict[str, Any] = {
    "product": lambda x: x * 2,
    "softmax": lambda x: F.softmax(x, -1),
    "topk": lambda x: x[:, -1].topk(3).values,
    "argmax with dims": lambda x: x.argmax(-1, keepdim=True),
    "argmax": lambda x: x.argmax(dim=-1),
    "classes in front": lambda x: F.cross_entropy(x.transpose(1, 2), some_labels()),
    "cast": lambda x: x.float().sum(),
    "probabilities": lambda x: F.cross_entropy(x.flatten(0, 1), torch.ones(B * T, V).double() / V),
    "log softmax": lambda x: F.nll_loss(F.log_softmax(x.view(-1, V), -1), some_labels().flatten()),
    "shifted": lambda x: F.cross_entropy(x[:, :-1].reshape(-1, V), some_labels()[:, 1:].flatten()),
    "detached": lambda x: x.detach().sum() + x.sum(),
    "one sample": lambda x: F.cross_entropy(x[0, 0], some_labels()[0, 0]),
}


@pytest.mark.parametrize("soft_cap", [None, 2.0])
@pytest.mark.parametrize("function", ANY.values(), ids=ANY)
def test_to_any_code_they_are_the_whole_logits(function: Any, soft_cap: float | None) -> None:
    logits, whole = some_logits(soft_cap=soft_cap)
    whole = whole if soft_cap is None else soft_cap * torch.tanh(whole / soft_cap)
    assert (logits.shape, logits.dtype, logits.device) == (whole.shape, whole.dtype, whole.device)
    got, want = function(logits), function(whole)
    assert not isinstance(got, ChunkedLogits)
    torch.testing.assert_close(got, want)


def test_what_chunks_cannot_give_is_refused_with_a_cure() -> None:
    logits, _ = some_logits()
    with pytest.raises(ConfigurationError, match="would never be called"):
        logits.register_hook(print)
    with pytest.raises(
        ConfigurationError, match=r"add_ is an in-place operation.* computed in chunks"
    ):
        logits.add_(1)
    two = nn.Sequential(nn.Linear(D, V), nn.Tanh())
    with pytest.raises(ConfigurationError, match="head=Sequential returns Tensor"):
        chunked_logits(torch.ones(2, D), two)
    with pytest.raises(ConfigurationError, match=r"(?s)soft_cap=0 .*z_loss=-1 .*chunk_size=0 "):
        LossOptions(soft_cap=0, z_loss=-1, chunk_size=0)


def test_a_trace_sees_the_cross_entropy_of_the_head() -> None:
    head = nn.Linear(D, V, bias=False)

    def step(batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = linear_cross_entropy(batch["hidden"], head, batch["labels"])
        return loss

    trace = trace_forward(head, step, {"hidden": torch.ones(B, T, D), "labels": some_labels()})
    (call,) = trace.calls
    (loss,) = [operation for operation in trace.operations if operation.name == "cross_entropy"]
    assert loss.outputs == trace.result
    logits, labels = loss.inputs
    reshaped = trace.operations[logits.maker]  # type: ignore[index]
    assert reshaped.inputs == call.outputs
    assert trace.operations[labels.maker].inputs[0].name == "labels"  # type: ignore[index]
    (made,) = [operation for operation in trace.operations if call.outputs[0] in operation.outputs]
    assert [value.name for value in made.inputs] == ["hidden", "weight"]


def test_a_look_at_losses_sees_the_labels_and_sharpens_the_logits() -> None:
    hidden, weight = (tensor.detach() for tensor in tensors(bias=False))
    batch = {"labels": some_labels()}
    look = LookAtLosses([batch], sharpens=True)
    with look.of(0):
        loss = linear_cross_entropy(hidden, weight, batch["labels"])
    torch.testing.assert_close(
        loss, whole_loss([hidden, 8 * weight], batch["labels"], reduction="mean")
    )
    (seen,) = look.seen[0]
    assert (seen.ignored, seen.is_mean, seen.place) == (IGNORED, True, 0)
    assert torch.equal(seen.labels, batch["labels"].flatten())


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_a_model_generates_the_same_text(temperature: float) -> None:
    texts = []
    for chunked in (False, True):
        torch.manual_seed(4)
        model = GPT(GPTConfig.preset("tiny", chunked_loss=chunked))
        prompt = torch.randint(0, 256, (2, 5))
        texts.append(model.generate(prompt, 4, temperature=temperature, top_k=3))
    assert torch.equal(*texts)
