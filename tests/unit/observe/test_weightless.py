"""Large tensors have no memory, small ones have values, and choices are even."""

import multiprocessing
import sys
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lightning_par.engine.collectives import all_gather, all_reduce
from lightning_par.observe.live_bytes import ACTIVATIONS, PARAMETERS
from lightning_par.observe.weightless import WeightlessTensors
from lightning_par.profiling.comm_volume import CommVolume
from lightning_par.verification.absent_ranks import lone_world


def test_a_step_on_more_weights_than_any_machine_holds():
    with WeightlessTensors() as live:
        layer = nn.Linear(1 << 20, 1 << 22, bias=False)
        live.mark(layer.weight, PARAMETERS)
        loss = layer(torch.zeros(2, 1 << 20)).square().mean()
        loss.backward()
        assert layer.weight.grad.shape == (1 << 22, 1 << 20)
    size = 4 << 42
    assert live.kinds[PARAMETERS] == size
    assert live.kinds[ACTIVATIONS] >= size
    assert torch.isfinite(loss)


def test_small_tensors_and_integers_keep_their_values():
    with WeightlessTensors():
        ids = torch.arange(100_000)
        assert int(ids.sum()) == 99_999 * 50_000
        assert torch.tensor([1.5, 2.5]).tolist() == [1.5, 2.5]


def test_values_that_nobody_knows_let_a_healthy_run_go_on():
    with WeightlessTensors():
        x = torch.randn(1000, 1000)
        assert bool(x.isfinite().all())
        assert not bool(x.isnan().any())
        assert float(x.norm()) == 1
        assert float(x[3, 5]) == 1


def test_choices_are_even_so_that_routed_tokens_have_a_number():
    with WeightlessTensors():
        scores = torch.randn(4000, 8)
        chosen = scores.topk(2, dim=-1).indices
        assert chosen.flatten().bincount(minlength=8).tolist() == [1000] * 8
        assert bool((chosen[:, 0] != chosen[:, 1]).all())
        assert scores[chosen[:, 0] == 2].shape == (1000, 8)
        assert F.one_hot(scores.argmax(-1), 8).sum(0).tolist() == [500] * 8


def test_no_time_is_spent_on_devices_of_tensors_in_checkpointed_blocks():
    contexts = partial(create_selective_checkpoint_contexts, [])
    block = nn.Sequential(*(nn.Linear(100, 100) for _ in range(8)))
    modes = [type(each) for each in contexts()]
    before, called = [mode.__torch_dispatch__ for mode in modes], []

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.endswith("_dynamo/eval_frame.py"):
            called.append(frame.f_code.co_name)

    with WeightlessTensors(), torch.autocast("cpu", torch.bfloat16):
        for profile in (None, count):  # the first time torch computes shapes
            sys.setprofile(profile)
            x = torch.zeros(100, 100, requires_grad=True)
            checkpoint(block, x, use_reentrant=False, context_fn=contexts).sum().backward()
            sys.setprofile(None)
            assert x.grad.device == torch.device("cpu")
    assert called.count("_fn") < 4 * len(block)  # each asks for six devices
    assert [mode.__torch_dispatch__ for mode in modes] == before


def test_new_tensors_of_a_pause_have_memory():
    live = WeightlessTensors()
    with live, live.paused():
        x = torch.ones(100_000)
    assert float(x.sum()) == 100_000


def heard():
    with lone_world(3, 8), WeightlessTensors(), CommVolume() as volume:
        x = torch.randn(100, 1000)
        torch.distributed.all_reduce(x)
        all_reduce(x, torch.distributed.group.WORLD).sum()
        all_gather(x, 0, torch.distributed.group.WORLD).sum()
    return {(e.axis, e.operation): (e.calls, e.payload) for e in volume.entries()}


def test_every_collective_without_values_is_heard_once():
    with multiprocessing.get_context("fork").Pool(1) as pool:
        found = pool.apply(heard)
    size = 4 * 100 * 1000
    assert found == {("world", "all_reduce"): (2, 2 * size), ("world", "all_gather"): (1, 8 * size)}


@pytest.mark.parametrize("size", [0, 3])
def test_marks_count_for_the_peak_if_a_tensor_was_alive_then(size):
    with WeightlessTensors() as live:
        kept = torch.empty(1_000_000)
        gone = torch.empty(2_000_000)
        del gone
        more = torch.empty(size)
        live.mark([kept, more], PARAMETERS)
    assert live.peak == 12_000_000
    assert live.kinds == {PARAMETERS: 4_000_000, ACTIVATIONS: 8_000_000}


def test_a_number_that_autograd_kept_has_its_value():
    with WeightlessTensors():
        loss = torch.empty(100, 90, requires_grad=True).sum() * 0.5
        kept = loss.grad_fn._saved_other
        assert bool(kept)
        assert float(kept) == 0.5
