"""Laws of the pipeline executor: any tree, any batch, any schedule equal one process."""

import time
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_par.engine.pipeline.actions import ActionKind
from lightning_par.engine.pipeline.p2p import Channel
from lightning_par.engine.pipeline.simulator import bubble_fraction
from lightning_par.engine.pipeline.stage import StageExit
from tests.support.models.staged import assert_equal_to_one_process, Block, build, data, Net, Staged
from tests.support.ranks.api import RankError, ranks, run_ranks

TWO, THREE = ((0, 1), (1, 3)), ((0, 1), (1, 2), (2, 3))


class TupleBlock(Block):
    """Gives the hidden states with what code after all blocks sums."""

    def forward(self, x):
        out = super().forward(x)
        short = torch.arange(5, dtype=torch.int16)  # that no backend sends
        return out, {"auxiliary": out.square().mean(-1), "fixed": short.long(), "short": short}


class TupleNet(Net):
    def __init__(self):
        super().__init__(TupleBlock)

    def forward(self, x):
        x, auxiliary = self.enter(x), 0
        for block in self.blocks:
            x, side = block(x)
            assert side["fixed"].tolist() == side["short"].tolist() == [0, 1, 2, 3, 4]
            auxiliary = auxiliary + side["auxiliary"]
        return self.leave(x) + 0.1 * auxiliary.unsqueeze(-1)


class CarriedBlock(Block):
    def forward(self, x):
        self.balance = x.sin().mean(-1)
        return super().forward(x)


class CarriedNet(Net):
    """Code after the blocks reads what each of them stored, as in a mixture of experts."""

    def __init__(self):
        super().__init__(CarriedBlock)

    def forward(self, x):
        out = super().forward(x)
        return out + 0.1 * sum(b.balance for b in self.blocks).unsqueeze(-1)


CASES = {
    "plain": (Net, {}),
    "tuples": (TupleNet, {}),
    "carried": (CarriedNet, {"carried": ("balance",)}),
}


@ranks(3)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zb-h2"])
@pytest.mark.parametrize("case", CASES)
def test_gradients_and_losses_equal_one_process(rank, world, case, schedule):
    kind, plan = CASES[case]
    for size, count in ((7, 3), (7, 5), (5, 2), (2, 1), (1, 4)):
        whole = build(kind)
        loss = whole.loss(data(size))
        loss.backward()
        staged = Staged(build(kind), THREE, plan)
        run = staged.train(data(size), count, schedule)
        names = assert_equal_to_one_process(staged, whole)
        assert {n for n in names if n.startswith("blocks")} == {
            n for n in names if n.startswith(f"blocks.{rank}.")
        }
        if rank < 2:
            assert run.results == {}
            continue
        weights = [s / size for s in sizes(size, count)]
        total = sum(w * run.results[i].item() for i, w in enumerate(weights))
        assert abs(total - loss.item()) < 1e-12


def sizes(size, count):
    count = min(size, count)
    return [size // count + (i < size % count) for i in range(count)]


@ranks(2)
def test_a_second_step_and_another_batch_size_equal_one_process(rank, world):
    whole, staged = build(TupleNet), Staged(build(TupleNet), TWO)
    for size in (7, 4, 7):
        whole.loss(data(size)).backward()
        staged.train(data(size), 3)
    assert_equal_to_one_process(staged, whole)


@ranks(3)
def test_forward_only_equals_one_process_and_leaves_no_gradient(rank, world):
    staged = Staged(build(CarriedNet), THREE, {"carried": ("balance",)})
    for size, count in ((7, 3), (2, 2), (7, 1)):
        run = staged.evaluate(data(size), count)
        assert staged.gradients_by_name() == {}
        assert len(run.results) == (min(size, count) if rank == 2 else 0)
        parts = data(size)["x"].split(sizes(size, count))
        targets = data(size)["y"].split(sizes(size, count))
        for index, loss in run.results.items():
            want = build(CarriedNet).loss({"x": parts[index], "y": targets[index]})
            assert abs(loss.item() - want.item()) < 1e-12


@ranks(2)
def test_the_last_backward_is_told(rank, world):
    staged = Staged(build(), TWO)
    staged.train(data(7), 3)
    assert staged.hooks.told == [False, False, True]


class FrozenNet(Net):
    """Nothing before the second stage is trained, so no gradient is sent."""

    def __init__(self):
        super().__init__()
        self.enter.requires_grad_(False)
        self.blocks[0].requires_grad_(False)


@ranks(3)
def test_frozen_first_stages_equal_one_process(rank, world):
    whole, staged = build(FrozenNet), Staged(build(FrozenNet), THREE)
    whole.loss(data(7)).backward()
    staged.train(data(7), 3)
    for name, grad in staged.gradients_by_name().items():
        torch.testing.assert_close(grad, dict(whole.named_parameters())[name].grad)
    assert bool(staged.gradients_by_name()) is (rank > 0)


def swallowing(rank, world):
    staged = Staged(build(), TWO)

    def step(index):
        try:
            return staged.model.loss(data(4))
        except StageExit:
            return torch.zeros(())

    staged.train(data(4), 1, step=step)


class TwiceNet(Net):
    def forward(self, x):
        x = self.blocks[0](self.enter(x))
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def calling_twice(rank, world):
    Staged(build(TwiceNet), TWO).train(data(4), 2)


class SkippingNet(Net):
    def forward(self, x):
        return self.leave(self.blocks[1](self.blocks[0](self.enter(x))))


def skipping(rank, world):
    Staged(build(SkippingNet), TWO).train(data(4), 2)


class EarlyHeadNet(Net):
    def forward(self, x):
        x = self.enter(x)
        return super().forward(x[..., :2] + self.leave(x))


def using_the_head_early(rank, world):
    Staged(build(EarlyHeadNet), TWO).train(data(4), 2)


class LateWeightNet(Net):
    def forward(self, x):
        return super().forward(x) + self.enter.weight.sum()


def using_a_first_weight_late(rank, world):
    Staged(build(LateWeightNet), TWO).train(data(4), 2)


class NumberBlock(Block):
    """Hands on a number that differs from one micro-batch to the next."""

    calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x), float(self.calls)


class NumberNet(Net):
    def __init__(self):
        super().__init__(NumberBlock)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x, _ = block(x)
        return self.leave(x)


def handing_on_another_number(rank, world):
    Staged(build(NumberNet), TWO).train(data(4), 2)


class RecomputedNet(Net):
    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return self.leave(x)


def checkpointing_reentrantly(rank, world):
    Staged(build(RecomputedNet), TWO).train(data(4), 2)


MISTAKES = {
    swallowing: r"rank 0.*PassedOverError: .*returned before it had called block 1.*bare `except:`",
    calling_twice: r"rank 0.*SecondCallError: block 0 was called twice in one step",
    skipping: r"rank 1.*PassedOverError: the step returned a result without calling the last block",
    using_the_head_early: r"rank 0.*PipelineError: the module leave is placed on the last",
    using_a_first_weight_late: r"rank 1.*PipelineError: enter.weight is on another pipeline",
    checkpointing_reentrantly: r"rank 0.*PipelineError: block 0 .* Pass use_reentrant=False",
    handing_on_another_number: r"rank 0.*has changed, .* it was 1\.0, and is now 2\.0",
}


@pytest.mark.distributed
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.__name__)
def test_a_step_that_a_pipeline_cannot_run_is_refused(mistake):
    with pytest.raises(RankError, match=MISTAKES[mistake]) as caught:
        run_ranks(mistake, 2, timeout=20)
    assert "in pipeline stage" in str(caught.value)


class LateTableNet(Net):
    """Calls a module of the first stage again, after the blocks."""

    def forward(self, x):
        return super().forward(x) + self.enter(x).mean(-1, keepdim=True)


@ranks(2)
def test_a_value_of_the_first_stage_used_on_the_last_makes_the_loss_nan(rank, world):
    run = Staged(build(LateTableNet), TWO).train(data(4), 2)
    assert [loss.isnan().item() for loss in run.results.values()] == [True] * (2 * rank)


class Holder:
    """Stands for a tensor that autograd saved; lives as long as the graph needs it."""

    def __init__(self, tensor):
        self.tensor = tensor


@ranks(3)
@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_micro_batches_in_flight_are_as_few_as_the_schedule_says(rank, world, schedule, count):
    staged, alive, peak = Staged(build(), THREE), {}, 0

    def step(index):
        nonlocal peak

        def pack(tensor):
            holder = Holder(tensor)
            alive.setdefault(index, weakref.WeakSet()).add(holder)
            return holder

        parts = [{k: v[[i]] for k, v in data(count).items()} for i in range(count)]
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda h: h.tensor):
            try:
                return staged.model.loss(parts[index])
            finally:
                peak = max(peak, sum(bool(holders) for holders in alive.values()))

    staged.train(data(count), count, schedule, step=step)
    assert peak == (count if schedule == "gpipe" else min(world - rank, count))
    assert not any(alive.values())


class LoggingChannel(Channel):
    """Notes what is posted and sent."""

    log = None

    def post_tensors(self, specs):
        self.log.append("post")
        return super().post_tensors(specs)

    def send_tensors(self, tensors):
        self.log.append("send")
        super().send_tensors(tensors)


@ranks(2)
def test_receives_are_posted_before_the_compute_that_they_overlap(rank, world):
    staged = Staged(build(), TWO, channel=LoggingChannel)
    log, batch = [], data(4)
    for link in staged.links.values():
        link.activations.log = link.gradients.log = log

    def step(index):
        log.append(f"F{index}")
        return staged.model.loss({k: v[[index]] for k, v in batch.items()})

    told = staged.hooks.before_backward
    staged.hooks.before_backward = lambda **options: (log.append("B"), told(**options))
    staged.train(batch, 4, step=step)
    log.clear()
    staged.train(batch, 4, step=step)
    assert " ".join(log) == POSTED[rank]


POSTED = [
    "F0 send post F1 send B post F2 send B post F3 send post B B",
    "post F0 post B send F1 post B send F2 post B send F3 B send",
]
"""F and B compute; a post before one of them is in flight while it runs."""

FORWARD, BACKWARD = 0.05, 0.1  # far above what other processes on the cores take


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(BACKWARD)
        return grad


class SleepBlock(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return Sleep.apply(x * self.scale)


@pytest.mark.alone
@ranks(4)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_measured_bubble_is_that_of_the_formula(rank, world, schedule):
    p, m = 4, 8
    staged = Staged(build(block=SleepBlock, blocks=4), ((0, 1), (1, 2), (2, 3), (3, 4)))
    wanted = (p - 1) / (m + p - 1)
    # A busy machine, and a first step, only add idle time: the least of the runs is the schedule's.
    found = [1.0]
    while min(found) - wanted >= 0.03 and len(found) < 5:
        dist.barrier()
        events = [None] * world
        dist.all_gather_object(events, staged.train(data(m), m, schedule).events)
        kinds = {e.action.kind: e.end - e.start for e in events[rank]}
        assert kinds[ActionKind.FORWARD] >= FORWARD
        found.append(bubble_fraction(events))
    assert abs(min(found) - wanted) < 0.03, (found, wanted)
