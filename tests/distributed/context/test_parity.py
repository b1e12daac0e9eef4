"""Training with divided sequences equals one process, and really is divided."""

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_par import SequenceRingStrategy
from lightning_par.profiling.comm_volume import CommVolume
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import assert_parity, quiet_trainer
from tests.support.ranks.api import run_ranks

SGD = {"optimizer": "sgd"}
CLIPPED = {"gradient_clip_val": 0.05}


def layout(cp: int, *, tp: int = 1, pp: int = 1, dp: int = 1, **options: Any) -> dict[str, Any]:
    return {
        "context_parallel_size": cp,
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "data_parallel_size": dp,
        **options,
    }


LAYOUTS = {
    "cp2": layout(2),
    "cp4": layout(4),
    "cp4 hybrid": layout(4, context_options={"method": "hybrid", "ulysses_size": 2}),
    "cp2 ulysses": layout(2, context_options={"method": "ulysses"}),
    "cp2 contiguous ring": layout(2, context_options={"layout": "contiguous", "route": "ring"}),
    "cp2 tp2": layout(2, tp=2),
    "cp2 tp2 whole sequences": layout(2, tp=2, sequence_parallel=False),
    "cp2 pp2": layout(2, pp=2),
    "cp2 dp2": layout(2, dp=2),
    "cp2 dp2 zero3": layout(2, dp=2, zero_stage=3),
    "cp2 pp2 zb-h1": layout(2, pp=2, schedule="zb-h1"),
    "cp2 tp2 pp2": layout(2, tp=2, pp=2),
}
QUICK = ("cp2", "cp4", "cp4 hybrid", "cp2 tp2", "cp2 pp2", "cp2 dp2", "cp2 tp2 pp2")


def sizes_of(name: str) -> tuple[int, int]:
    """Ranks and replicas."""
    options = LAYOUTS[name]
    sizes = [options[f"{a}_parallel_size"] for a in ("context", "tensor", "pipeline", "data")]
    return torch.Size(sizes).numel(), sizes[-1]


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.exhaustive) for n in LAYOUTS],
)
def test_divided_sequences_equal_one_process(name: str) -> None:
    """Tied head, uneven labels (none of sample 0, all of sample 5), odd last batch, clipping; 12
    tokens, which 4 ranks of a zigzag have to pad.
    """
    world, replicas = sizes_of(name)
    sizes = {"batch_size": max(4, 2 * replicas), "size": max(10, 5 * replicas)}
    assert_parity(
        "hybrid3d",
        LAYOUTS[name],
        world,
        replicas,
        **sizes,
        ignored=True,
        module=SGD,
        trainer=CLIPPED,
    )


def test_recomputed_blocks_attend_to_all_tokens_again() -> None:
    module = {"optimizer": "sgd", "recompute": True}
    assert_parity("sequence_ring", {}, 2, 1, batch_size=4, ignored=True, module=module)


def test_rank_without_a_valid_label_equals_one_process() -> None:
    """Sample 5 has no label that counts, others only some at their end, which is on one rank."""
    options = {"layout": "contiguous"}
    assert_parity("sequence_ring", options, 4, 1, batch_size=2, ignored=True, module=SGD)


@pytest.mark.parametrize("name", ["cp2", pytest.param("cp2 dp2", marks=pytest.mark.exhaustive)])
def test_accumulated_batches_equal_one_process(name: str) -> None:
    world, replicas = sizes_of(name)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    run = {"batch_size": 4, "size": 18, "ignored": True, "module": SGD, "trainer": options}
    assert_parity("hybrid3d", LAYOUTS[name], world, replicas, **run)


class _Watch(Callback):
    """Shapes that the blocks see, and what the third step sends."""

    def __init__(self) -> None:
        self.tokens: set[int] = set()
        self.sent: list[tuple[str, str, int]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for block in pl_module.model.blocks:
            block.register_forward_pre_hook(lambda _, args: self.tokens.add(args[0].shape[1]))

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        assert batch["ids"].shape[1] == 12  # callbacks see whole samples
        if index == 1:  # the first step looks at whole sequences, too
            self.tokens.clear()
        if index == 2:
            self.comm_volume = CommVolume(trainer.strategy.parallel_model.groups)
            self.comm_volume.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        if hasattr(self, "comm_volume"):
            self.comm_volume.__exit__(None, None, None)
            self.sent = [(e.axis, e.operation, e.sent) for e in self.comm_volume.entries()]


def watch(rank: int, world: int, options: dict[str, Any]) -> Any:
    seen = _Watch()
    trainer = quiet_trainer(
        devices=world, strategy=SequenceRingStrategy(**options), max_steps=3, callbacks=[seen]
    )
    trainer.fit(ToyModule(), loader(ToyData(12), 4))
    return seen.tokens, [s for s in seen.sent if s[1] in ("send", "all_to_all")]


def test_blocks_see_their_tokens_and_rings_send_the_formula() -> None:
    """float32: keys and values of 4 samples, 2 heads of 4 dims, 6 tokens per rank, 4 blocks."""
    found = run_ranks(watch, 2, {}, timeout=120)
    M = 2 * 4 * 2 * 4 * 6 * 4
    assert [tokens for tokens, _ in found] == [{6}, {6}]
    sent = [
        total for _, kinds in found for axis, kind, total in kinds if (axis, kind) == ("cp", "send")
    ]
    assert sum(sent) == 2.25 * M * 2 * 4
    found = run_ranks(watch, 2, {"method": "ulysses"}, timeout=120)
    assert [[k for _, k, _ in kinds] for _, kinds in found] == [["all_to_all"]] * 2
