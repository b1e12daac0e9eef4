"""Step time of `pipeline_1f1b` against torch's own Schedule1F1B, pp 2 on two ranks.

The same stages (embedding and half of the blocks; the other half, norm and head), micro-batches and
loss. Theirs is a bare loop; ours is measured as a bare loop over the engine's `PipelineExecutor`,
and through the Trainer.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _gpt import BenchModule, CONFIG, loader, make_optimizer
from _paired import Arguments, compare, fit, launch, parse_arguments, Turn
from torch import nn, Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from lightning_par.engine.batch import signature, split_batch
from lightning_par.engine.pipeline.executor import PipelineExecutor
from lightning_par.engine.pipeline.module_split import cut_stages
from lightning_par.engine.pipeline.schedules import build_schedule
from lightning_par.engine.pipeline.stage_links import connect, group_name
from lightning_par.models.gpt.model import GPT
from lightning_par.plan.resolved_plan import resolve_plan
from lightning_par.strategies import Pipeline1F1BStrategy

BATCH_SIZE, MICROBATCHES, STAGES = 8, 8, 2
CPU = torch.device("cpu")


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss per token of a micro-batch."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class TorchStage(nn.Module):
    """What one stage of torch's pipeline runs."""

    def __init__(self, whole: GPT, stage: int) -> None:
        super().__init__()
        half = len(whole.blocks) // STAGES
        self.blocks = whole.blocks[stage * half : (stage + 1) * half]
        self.embed = whole.embed if stage == 0 else None
        self.norm, self.head = (whole.norm, whole.head) if stage == STAGES - 1 else (None, None)
        self.rotary = whole.rotary

    def forward(self, hidden: Tensor) -> Tensor:
        """Refine the hidden states, from tokens on the first stage, to logits on the last."""
        assert self.rotary is not None
        rotary = self.rotary(torch.arange(hidden.shape[1])[None])
        if self.embed is not None:
            hidden = self.embed(hidden)
        for block in self.blocks:
            hidden = block(hidden, rotary)
        return hidden if self.head is None else self.head(self.norm(hidden))


def endless_batches() -> Iterator[dict[str, Tensor]]:
    return itertools.chain.from_iterable(itertools.repeat(loader(BATCH_SIZE)))


def torch_loop(arguments: Arguments, turn: Turn) -> None:
    """Train with torch's schedule."""
    rank = dist.get_rank()
    module = TorchStage(GPT(CONFIG), rank)
    stage = PipelineStage(module, rank, STAGES, CPU)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    optimizer = make_optimizer(list(module.parameters()))
    batches = endless_batches()
    for _ in range(arguments.total_steps):
        batch = next(batches)
        turn.next()
        torch_step(schedule, optimizer, batch)


def torch_step(
    schedule: Schedule1F1B, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]
) -> None:
    """Train one step of two stages with torch's schedule."""
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        schedule.step(batch["input_ids"])
    else:
        schedule.step(target=batch["labels"], losses=[])
    optimizer.step()


class _NoHooks:
    """One replica: nothing surrounds a forward or a backward."""

    def call(self, step: Callable[[], Any]) -> Any:
        """Run the step."""
        return step()

    def before_backward(self, *, is_last: bool, is_whole: bool) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""


def make_executor(model: GPT) -> PipelineExecutor:
    """Cut the model and connect its stages."""
    rank = dist.get_rank()
    layout = resolve_plan(model, model.parallel_plan())
    half = CONFIG.num_layers // STAGES
    stages = cut_stages(model, layout, [rank], [(0, half), (half, CONFIG.num_layers)])
    names = (group_name("activations", 0, 1), group_name("gradients", 1, 0))
    groups = {name: dist.new_group() for name in names}
    links = connect(range(STAGES), rank, groups.__getitem__, int, CPU)
    return PipelineExecutor(stages, links, _NoHooks())


def engine_loop(arguments: Arguments, turn: Turn) -> None:
    """Train with our executor."""
    model = GPT(CONFIG)
    executor = make_executor(model)
    optimizer = make_optimizer(list(model.parameters()))
    batches = endless_batches()
    schedule = build_schedule("1f1b", STAGES, MICROBATCHES)
    for _ in range(arguments.total_steps):
        batch = next(batches)
        turn.next()
        optimizer.zero_grad()
        parts = split_batch(batch, MICROBATCHES)

        def step(index: int, parts: list[Any] = parts) -> Tensor:
            part = parts[index]
            return loss_of(model(part["input_ids"]), part["labels"])

        signatures = [signature(part) for part in parts]
        executor.run(schedule, step, signatures, lambda _, loss: loss / MICROBATCHES)
        optimizer.step()


def body(arguments: Arguments) -> None:
    """Run on every rank."""

    def trainer(turn: Turn) -> None:
        strategy = Pipeline1F1BStrategy(num_microbatches=MICROBATCHES)
        fit(BenchModule(), loader(BATCH_SIZE), strategy, turn, arguments)

    compare(
        "pipeline parallel, 2 ranks",
        {
            "Schedule1F1B": lambda turn: torch_loop(arguments, turn),
            "PipelineExecutor": lambda turn: engine_loop(arguments, turn),
            "pipeline_1f1b, Trainer": trainer,
        },
        arguments,
        targets={"PipelineExecutor": 1.0, "pipeline_1f1b, Trainer": 1.0},
    )


if __name__ == "__main__":
    launch(body, parse_arguments(__doc__), ranks=2)
