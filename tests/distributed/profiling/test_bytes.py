"""Bytes on the wire of one training step equal the formulas; none is sent that is not needed."""

from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_par import Hybrid3DStrategy
from lightning_par.profiling.comm_volume import CommVolume
from tests.support.models.toy_gpt import loader, TOKENS, ToyData, ToyModule, WIDTH
from tests.support.ranks.api import run_ranks

BLOCKS, VOCAB, BATCH, FLOAT, DOUBLE = 4, 20, 8, 4, 8
ACTIVATION = BATCH * TOKENS * WIDTH * FLOAT


class _Counter(Callback):
    """Counts the third step: by then headers are known and caches are filled."""

    def __init__(self) -> None:
        self.comm_volume: CommVolume | None = None
        self.found: dict[Any, Any] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        if index == 2:
            self.comm_volume = CommVolume(trainer.strategy.parallel_model.groups)
            self.comm_volume.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        if self.comm_volume is not None:
            self.comm_volume.__exit__(None, None, None)
            entries = self.comm_volume.entries()
            self.found = {(e.axis, e.operation): (e.calls, e.payload, e.sent) for e in entries}
            self.comm_volume = None


def count(rank: int, world: int, options: dict[str, Any], trainer: dict[str, Any]) -> Any:
    counter, module = _Counter(), ToyModule("sgd", vocab=VOCAB, blocks=BLOCKS, tied=False)
    parameters = {n: p.numel() for n, p in module.named_parameters()}
    pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=Hybrid3DStrategy(**options),
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[counter],
        **trainer,
    ).fit(module, loader(ToyData(200, vocab=VOCAB), BATCH))
    return counter.found, parameters


def counted(world: int, options: dict[str, Any], **trainer: Any) -> Any:
    return run_ranks(count, world, options, trainer, timeout=120)


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_tensor_parallel_moves_one_activation_per_linear_pair_and_direction(
    sequence_parallel: bool,
) -> None:
    options = {"pipeline_parallel_size": 1, "sequence_parallel": sequence_parallel}
    for found, parameters in counted(2, options):
        pairs = 2 * BLOCKS + 1  # attention and MLP of every block; the embedding with the head
        tokens = BATCH * TOKENS
        # Maxima, then two sums; at the end whether loss and gradients are finite.
        loss = [tokens * FLOAT, 2 * tokens * FLOAT, 2 * DOUBLE]
        if sequence_parallel:
            whole = ("norm", "out.bias", "mlp.2.bias", "position")
            sizes = [n for name, n in parameters.items() if any(w in name for w in whole)]
            # With each gradient goes whether there is one.
            reduced = [*loss, (sum(sizes) + len(sizes)) * FLOAT]
            moved = (2 * pairs, 2 * pairs * ACTIVATION, pairs * ACTIVATION)
            assert found["tp", "all_gather"] == moved
            assert found["tp", "reduce_scatter"] == moved
        else:
            reduced = [*loss, *[ACTIVATION] * (2 * pairs)]
            assert ("tp", "all_gather") not in found
        assert found["tp", "all_reduce"] == (len(reduced), sum(reduced), sum(reduced))


@pytest.mark.parametrize("microbatches", [1, 4])
def test_pipeline_sends_every_activation_and_its_gradient_once(microbatches: int) -> None:
    options = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 4,
        "num_microbatches": microbatches,
    }
    for stage, (found, _) in enumerate(counted(4, options)):
        once = (microbatches, ACTIVATION)
        sends = found.get(("pp activations", "send"), (0, 0))[:2]
        returns = found.get(("pp gradients", "send"), (0, 0))[:2]
        assert sends == (once if stage < 3 else (0, 0))
        # Each gradient goes with a byte, which says whether there is one.
        answers = (2 * microbatches, ACTIVATION + microbatches)
        assert returns == (answers if stage > 0 else (0, 0))


def test_sharded_tensor_parallel_pipeline_sends_shards_of_activations() -> None:
    options = {"num_microbatches": 2}
    for rank, (found, _) in enumerate(counted(4, options)):
        once = (2, ACTIVATION // 2, ACTIVATION // 2)  # T/tp tokens of two micro-batches
        answers = (4, ACTIVATION // 2 + 2, ACTIVATION // 2 + 2)
        wanted = ("pp activations", once) if rank < 2 else ("pp gradients", answers)
        assert found[wanted[0], "send"] == wanted[1]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_data_parallel_moves_parameters_and_gradients_as_its_zero_stage_says(
    zero_stage: int,
) -> None:
    options = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "zero_stage": zero_stage,
    }
    for found, parameters in counted(2, options):
        everything = sum(parameters.values()) * FLOAT
        blocks = sum(n for name, n in parameters.items() if ".blocks." in name) * FLOAT
        if zero_stage == 0:
            # With each gradient goes whether there is one.
            payload = everything + len(parameters) * FLOAT
            assert found["dp gradients", "all_reduce"] == (1, payload, payload)
            continue
        gathered = everything if zero_stage < 3 else everything + blocks
        assert found["dp_shard", "all_gather"][1:] == (gathered, gathered // 2)
        assert found["dp_shard", "reduce_scatter"] == (BLOCKS + 1, everything, everything // 2)


def test_accumulating_batches_communicates_no_gradient() -> None:
    options = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    for found, _ in counted(2, options, accumulate_grad_batches=4):
        assert ("dp_shard", "reduce_scatter") not in found
