"""A rank that communicates alone in a hook is named with its line, and never waits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.ranks.api import run_ranks
from tests.support.user_code import Case, train_case

CALLS: dict[str, Callable[[Any], Any]] = {
    "save_checkpoint": lambda m: m.trainer.save_checkpoint("alone.ckpt"),
    "all_gather": lambda m: m.all_gather(torch.ones(2)),
    "strategy.whole": lambda m: m.trainer.strategy.whole().__enter__(),
    "log('x', sync_dist=True)": lambda m: m.log("x", 1.0, sync_dist=True),
    "strategy.barrier": lambda m: m.trainer.strategy.barrier(),
    "strategy.broadcast": lambda m: m.trainer.strategy.broadcast(1),
    "strategy.reduce": lambda m: m.trainer.strategy.reduce(torch.ones(2)),
    "full_parameter": lambda m: m.trainer.strategy.full_parameter("net.head.weight"),
    "gather_state_dict": lambda m: m.trainer.strategy.gather_state_dict(),
    "a forward of the model": lambda m: m.net(torch.arange(8).view(2, 4)),
    "reading a tensor of shape ()": lambda m: float(m.net.state_dict()["emb.weight"].norm()),
}
"""What LP415 says of the rank -> the call."""
HOOKS = ("on_train_batch_end", "on_train_epoch_end", "on_validation_epoch_end")


def alone(hook: str, call: str) -> Case:
    """A module that calls it in the second epoch, or, in hooks of batches, in the first step."""

    class Module(PlainModule):
        runs = 0

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch)

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(token_pairs(8), 4)

    def run(module: Any, *_: Any) -> None:
        module.runs += 1
        is_due = module.runs == (1 if "batch" in hook else 2)
        if is_due and module.trainer.is_global_zero:
            CALLS[call](module)

    setattr(Module, hook, run)
    return Case(
        make=lambda: (Module(), token_pairs(16)),
        cells={},
        strategy={"verify": False},
        trainer={"max_steps": -1, "max_epochs": 2},
    )


def _train_rank(rank: int, world: int, layout: str, hook: str, call: str) -> Any:
    return train_case(alone(hook, call), layout, rank, world).get("refused", "trained on")


@pytest.mark.parametrize(
    "layout",
    ["tp2", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("pp2", "zero3"))],
)
@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_on_one_rank_is_named(call: str, hook: str, layout: str) -> None:
    # Far less than the timeout of half an hour; LP415 comes at once.
    for text in run_ranks(_train_rank, 2, layout, hook, call, timeout=120):
        assert f"Module.{hook}: ranks wait for each other in different calls (rank 0: " in text
        said = text.partition("(rank 0: ")[2]
        assert said.startswith(call), text
        assert "rank 1: the end of the hook" in said
        assert "at test_calls_on_one_rank.py:" in said
