"""What a step computes and what it saves are counted exactly."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_par.engine.memory.measured import bytes_held, SavedActivations
from lightning_par.observe.flops import FlopCounter
from lightning_par.observe.live_bytes import LiveBytes

BATCH, IN, HIDDEN, OUT = 5, 3, 7, 2


def network():
    return nn.Sequential(nn.Linear(IN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, OUT))


def test_a_linear_layer_counts_two_products_in_its_backward_if_its_input_needs_one():
    model, x = network(), torch.randn(BATCH, IN)
    first, second = 2 * BATCH * IN * HIDDEN, 2 * BATCH * HIDDEN * OUT
    with FlopCounter() as counter:
        model(x).sum().backward()
    assert counter.model == 2 * first + 3 * second
    with FlopCounter() as counter:
        model(x.requires_grad_()).sum().backward()
    assert counter.model == 3 * (first + second)
    assert counter.recomputed == 0


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_checkpointing_computes_again_is_counted_apart(reentrant):
    model, x = network(), torch.randn(BATCH, IN, requires_grad=True)
    forward = 2 * BATCH * (IN * HIDDEN + HIDDEN * OUT)
    again = forward if reentrant else 2 * BATCH * IN * HIDDEN  # the last product is not needed
    with FlopCounter() as counter:
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    assert counter.model == 3 * forward
    assert counter.recomputed == again


def test_attention_is_counted_with_its_own_heads_for_keys():
    q = torch.randn(2, 6, 8, 4, requires_grad=True)
    k = torch.randn(2, 3, 8, 4, requires_grad=True)
    product = 2 * (2 * 6 * 8 * 8 * 4)
    with FlopCounter() as counter:
        out = nn.functional.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        assert counter.model == 2 * product
        out.sum().backward()
    assert counter.model == (2 + 5) * product


def test_saved_bytes_are_those_of_inputs_and_outputs_but_not_of_parameters():
    model, x = network(), torch.randn(BATCH, IN)
    with SavedActivations() as saved:
        out = model(x)
        # Inputs of both layers; the output of tanh is the input of the second.
        assert saved.peak == 4 * BATCH * (IN + HIDDEN)
        out.sum().backward()
        saved_once = saved.peak
        model(x).sum().backward()
    assert saved.peak == saved_once
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    for _ in range(2):
        model(x).sum().backward()
    for parameter, grad in zip(model.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=0)


def test_two_forwards_hold_twice_as_much_until_their_backwards():
    model, x = network(), torch.randn(BATCH, IN)
    with SavedActivations() as saved:
        losses = [model(x.clone()).sum() for _ in range(2)]
        for loss in losses:
            loss.backward()
        del loss, losses
    assert saved.peak == 2 * 4 * BATCH * (IN + HIDDEN)


def test_memory_of_a_parameter_that_was_freed_counts_once_something_else_is_there():
    layer, x = nn.Linear(IN, HIDDEN), torch.randn(BATCH, IN)
    with SavedActivations() as saved:
        layer(x).sum().backward()
        address = layer.weight.untyped_storage().data_ptr()
        saved._parameters[x.untyped_storage().data_ptr()] = saved._parameters[address]
        before, saved.peak = saved.peak, 0
        layer(x).sum().backward()
    assert saved.peak == before == 4 * BATCH * IN


def test_memory_that_is_shared_counts_once():
    x = torch.zeros(6, 5)
    assert bytes_held({"a": x, "b": [x[1:], torch.zeros(7)], "c": 3, "d": None}) == 4 * 37


def test_live_bytes_count_a_storage_once_and_until_it_is_gone():
    outside = torch.zeros(7)
    with LiveBytes(besides={"a": [outside]}) as live:
        x = torch.zeros(3, 5)
        view = x.t()[1:]
        x.add_(1)
        outside[2:].mul_(2)
        assert live.now == 4 * 15
        del x
        assert live.now == 4 * 15
        y = view + 1
        del view
        assert (live.now, live.peak) == (4 * 10 + 4 * 2, 4 * 15 + 4 * 12)
    del y
    assert live.now == 0


def test_live_bytes_count_what_no_operation_allocated_and_what_grows():
    with LiveBytes() as live:
        file = torch.frombuffer(bytearray(44), dtype=torch.float32)
        part = file[3:5]
        assert live.now == 44
        del file, part
        grown = torch.zeros(0)
        torch.add(torch.ones(6), 1, out=grown)
        assert live.now == 4 * 6
