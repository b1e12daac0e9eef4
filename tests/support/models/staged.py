"""Small networks on pipeline stages, run by the executor alone, without a Trainer."""

from contextlib import contextmanager
from itertools import permutations

import torch
import torch.distributed as dist
from torch import nn

from lightning_par.engine.batch import signature, split_batch
from lightning_par.engine.pipeline.executor import PipelineExecutor
from lightning_par.engine.pipeline.module_split import cut_stages
from lightning_par.engine.pipeline.p2p import Channel
from lightning_par.engine.pipeline.schedules import (
    build_schedule,
    forward_only,
    place_stages,
    splits_backward,
)
from lightning_par.engine.pipeline.split_backward import defer_weight_gradients, WeightGradients
from lightning_par.engine.pipeline.stage_links import connect, group_name
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.plan.resolved_plan import resolve_plan

WIDTH = 3


class Block(nn.Module):
    """Blocks differ in their hidden width."""

    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())


class Net(nn.Module):
    """A module before the blocks, three blocks of a kind, one after; the loss is a mean of B."""

    def __init__(self, block=Block, blocks=3):
        super().__init__()
        self.enter = nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList(block(h) for h in (5, 7, 2, 3, 4, 6, 8, 9)[:blocks])
        self.leave = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.leave(x)

    def loss(self, batch):
        return (self(batch["x"]).squeeze(-1) - batch["y"]).square().mean()


def data(size):
    generator = torch.Generator().manual_seed(size)
    x = torch.randn(size, 2, dtype=torch.float64, generator=generator)
    return {"x": x, "y": x.sum(-1).sin()}


class Hooks:
    """Surround nothing; keep what `before_backward` was told."""

    def __init__(self):
        self.told = []
        self.finished = 0

    def call(self, step):
        return step()

    def before_backward(self, *, is_last, is_whole):
        self.told.append(is_last)

    def without_backward(self):
        pass

    def finish(self):
        self.finished += 1


class Staged:
    """The stages of a network on this rank.

    Args:
        model: The whole network; it is cut.
        bounds: First and one-past-last block of every stage.
        plan: Fields of its plan beside `blocks`.
        channel: The class that sends.
        schedule: Says where the stages are, and runs by default.
        wrap: Called with every block of this rank, after weights' gradients may wait.
    """

    def __init__(
        self, model, bounds, plan=None, channel=Channel, schedule="1f1b", wrap=lambda block: None
    ):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        device = next(model.parameters()).device
        layout = resolve_plan(model, ParallelPlan(blocks="blocks", **(plan or {})))
        self.model, self.bounds, self.schedule = model, bounds, schedule
        self.chunks = len(bounds) // self.world
        self.rank_of_stage = place_stages(schedule, self.world, self.chunks)
        held = [stage for stage, rank in enumerate(self.rank_of_stage) if rank == self.rank]
        self.stages = cut_stages(model, layout, held, bounds)
        self.stage = self.stages[0]
        gradients = WeightGradients()
        for stage in self.stages:
            for block in model.blocks[stage.first_block : stage.end_block]:
                if splits_backward(schedule, self.world):
                    defer_weight_gradients(block, gradients)
                wrap(block)
        self.links = connect(self.rank_of_stage, self.rank, pipeline_group, int, device, channel)
        self.hooks = Hooks()
        self.executor = PipelineExecutor(self.stages, self.links, self.hooks, gradients)

    def train(self, batch, count, schedule=None, step=None):
        """Run a training step on `count` micro-batches, weighted by their samples."""
        parts = split_batch(batch, count)
        weights = [len(part["y"]) / len(batch["y"]) for part in parts]
        return self.executor.run(
            build_schedule(schedule or self.schedule, self.world, len(parts), self.chunks),
            step or (lambda index: self.model.loss(parts[index])),
            [signature(part, "training") for part in parts],
            lambda index, loss: loss * weights[index],
        )

    @torch.no_grad()
    def evaluate(self, batch, count):
        parts = split_batch(batch, count)
        return self.executor.run(
            forward_only(self.rank_of_stage, len(parts)),
            lambda index: self.model.loss(parts[index]),
            [signature(part, "evaluation") for part in parts],
            None,
        )

    def gradients_by_name(self):
        return {n: p.grad for n, p in self.model.named_parameters() if p.grad is not None}


_GROUPS = {}


def pipeline_group(name):
    """A group over all ranks; made once per process, all together: groups outlive the tests."""
    world = dist.group.WORLD
    if world not in _GROUPS:
        everyone = list(range(dist.get_world_size()))
        ends = permutations(everyone, 2)
        names = {group_name(kind, *e): None for e in ends for kind in ("activations", "gradients")}
        _GROUPS[world] = {name: dist.new_group(everyone) for name in names}
    return _GROUPS[world][name]


@contextmanager
def double():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(kind=Net, **options):
    """The same network on every rank."""
    torch.manual_seed(11)
    with double():
        return kind(**options)


def assert_equal_to_one_process(staged, whole):
    """Every rank compares the gradients of its own parameters with those of the whole network."""
    wanted = {n: p.grad for n, p in whole.named_parameters()}
    found = staged.gradients_by_name()
    assert set(found) == {n for n, _ in staged.model.named_parameters()}
    for name, grad in found.items():
        torch.testing.assert_close(grad, wanted[name], rtol=0, atol=1e-12, msg=name)
    return set(found)
