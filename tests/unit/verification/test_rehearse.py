"""A rehearsal runs one rank of any mesh alone, refuses what the run would, and leaves nothing."""

import multiprocessing
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from lightning_par import Hybrid3DStrategy
from lightning_par.checkpoint.progress import showing
from lightning_par.errors import ConfigurationError, LightningParError
from lightning_par.models import TextDataModule
from lightning_par.observe.live_bytes import (
    ACTIVATIONS,
    COMMUNICATION,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
)
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.sizes import ParallelSizes
from lightning_par.verification.rehearse import distinct_ranks, rehearse, rehearse_apart
from tests.support.models.pooling_encoder import labeled_tokens, PoolingEncoder
from tests.support.models.rehearsed import build
from tests.support.parity import quiet_trainer
from tests.support.progress import Kept

CUBE = {
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "data_parallel_size": 2,
    "num_microbatches": 3,
}
WIDE = {"model_dim": 4096, "num_heads": 32, "num_kv_heads": 8, "vocab_size": 50_000}


def make(sizes, overrides, observer, environment, **options):
    given = {"plugins": [environment], "callbacks": [observer], **options}
    return build(sizes, overrides=overrides, **given)


def run(rank, sizes=CUBE, overrides=WIDE):
    return rehearse_apart(partial(make, sizes, overrides), num_nodes=1, devices=8, rank=rank)


def test_a_rank_of_a_large_model_takes_no_memory_and_says_what_it_would_take(tmp_path):
    kept = Kept(tmp_path / "kept")
    with showing(kept):
        found = run(7)
    ((name, unit, done, total),) = kept.works()
    assert (name, unit, total) == ("rehearsing rank 7", "operations", None)
    assert done > 1000
    assert found.place == "rank 7 (pp 1, dp_shard 1, tp 1)"
    assert set(found.memory) == {ACTIVATIONS, COMMUNICATION, GRADIENTS, OPTIMIZER, PARAMETERS}
    # Five blocks: the last stage has two, half of their weights, and half of those of the replica.
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 11_008 // 2 * 2
    assert found.parameters == pytest.approx((2 * block + 50_000 * 4096) / 4, rel=0.1)
    # Adam's two moments in float32 of this rank's shard; ZeRO 1 keeps the gathered weights, too.
    assert found.memory[OPTIMIZER] == pytest.approx(8 * found.parameters, rel=0.01)
    assert found.memory[PARAMETERS] == pytest.approx(4 * (1 + 2) * found.parameters, rel=0.1)
    assert found.peak > 2**30 > found.host_bytes


@pytest.mark.parametrize(
    ("sizes", "overrides", "said"),
    [
        ({**CUBE, "pipeline_parallel_size": 4, "data_parallel_size": 1}, {"num_layers": 3}, "3"),
        ({**CUBE, "tensor_parallel_size": 8, "pipeline_parallel_size": 1, "data_parallel_size": 1},
         {"num_heads": 4, "num_kv_heads": 2}, "not divisible by 8"),
        ({**CUBE, "plan": ParallelPlan(blocks="model.layers", tensor={"nothing.*": "colwise"})},
         {}, "nothing"),
        ({**CUBE, "num_microbatches": 7}, {}, "7"),
    ],
    ids=["a rank without blocks", "heads", "a pattern that matches nothing", "micro-batches"],
)  # fmt: skip
def test_what_the_run_refuses_at_its_start_the_rehearsal_refuses(sizes, overrides, said):
    with pytest.raises(LightningParError, match=said):
        run(0, sizes, overrides)


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(
        ConfigurationError, match=r"rank=8 does not exist: .* have the ranks 0 to 7"
    ):
        run(8)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"accelerator": "gpu"}, r"accelerator='cpu', num_nodes=1, devices=8, max_steps=1"),
        ({"max_steps": 2}, r"has max_steps=2\. .*devices=8, max_steps=1"),
        ({"callbacks": []}, r"has no observer\. .*callbacks=\[observer\]"),
    ],
    ids=["for GPUs", "two steps", "without what takes the step down"],
)
def test_another_trainer_is_refused_with_the_one_to_build(options, said):
    with pytest.raises(ConfigurationError, match=said) as caught:
        rehearse_apart(partial(make, CUBE, {}, **options), num_nodes=1, devices=8, rank=0)
    assert caught.value.code == "LP918"


def test_a_last_stage_with_divided_sequences_compares_no_losses():
    """On ranks that are not there the loss of whole sequences has no value."""
    sizes = {**CUBE, "data_parallel_size": 1, "context_parallel_size": 2}
    assert run(7, sizes, {}).memory[GRADIENTS] > 0


def test_every_batch_of_an_accumulated_step_counts():
    """Under ZeRO 3 each gathers the blocks; the last one sums the gradients of all."""
    sizes = {**CUBE, "pipeline_parallel_size": 1, "data_parallel_size": 4, "zero_stage": 3}
    sizes.pop("num_microbatches")
    calls = {}
    for count in (1, 2):
        options = {"accumulate_grad_batches": count}
        found = rehearse_apart(partial(make, sizes, {}, **options), num_nodes=1, devices=8, rank=0)
        volume = {(e.axis, e.operation): e.calls for e in found.volume}
        calls[count] = volume["dp_shard", "all_gather"], volume["dp_shard", "reduce_scatter"]
        assert found.memory[GRADIENTS] > 0
    assert calls[2] == (2 * calls[1][0], calls[1][1])


def make_batches_of(size, observer, environment):
    sizes = {"data_parallel_size": 8, "zero_stage": 3}
    sizes |= {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
    trainer, module, _ = make(sizes, {"vocab_size": 50_000}, observer, environment)
    return trainer, module, TextDataModule(length=48, batch_size=size, max_bytes=200_000)


def test_the_memory_of_the_first_look_is_left_out():
    """It takes four samples in both cases, so that it can mask labels of some."""
    held = [
        rehearse_apart(partial(make_batches_of, size), num_nodes=1, devices=8, rank=0).peak
        for size in (1, 2)
    ]
    assert held[0] < 0.8 * held[1]


def test_distinct_ranks_are_one_of_every_stage_and_the_last():
    sizes = ParallelSizes(pipeline=3, data_shard=2, tensor=2)
    assert distinct_ranks(sizes) == [0, 4, 8, 11]


def places():
    patched = (dist, "broadcast_object_list"), (torch.UntypedStorage, "resize_")
    return [vars(owner).get(name) for owner, name in patched]


def left_behind(sizes):
    before, error = places(), None
    try:
        rehearse(partial(make, sizes, {}), num_nodes=1, devices=8, rank=5)
    except LightningParError as caught:
        error = str(caught)
    tensor = torch.empty(100_000).fill_(3)
    return error, dist.is_initialized(), places() == before, float(tensor.sum())


def beside_a_group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return left_behind(CUBE)[0]


def test_a_process_group_is_refused():
    """What follows rehearses in a process without one, as the refusal advises."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        assert "already has a process group. Call rehearse_apart(...)" in pool.apply(beside_a_group)


@pytest.mark.parametrize("sizes", [CUBE, {**CUBE, "num_microbatches": 7}], ids=["ran", "refused"])
def test_nothing_is_left_behind(sizes):
    with multiprocessing.get_context("fork").Pool(1) as pool:
        error, has_group, is_restored, total = pool.apply(left_behind, (sizes,))
    assert (error is None) == (sizes is CUBE)
    assert (has_group, is_restored, total) == (False, True, 300_000.0)


def make_encoder(observer, environment):
    trainer = quiet_trainer(
        accelerator="cpu",
        devices=4,
        max_steps=1,
        # "evict" reads a list of hosts at the start of a run, but not of a rehearsal.
        strategy=Hybrid3DStrategy(
            tensor_parallel_size=2, pipeline_parallel_size=2, on_difference="evict"
        ),
        callbacks=[observer],
        plugins=[environment],
    )
    return trainer, PoolingEncoder(), labeled_tokens()


@pytest.mark.parametrize("rank", [0, 3])
def test_a_small_model_of_a_user_is_rehearsed(rank):
    """Its tensors are small enough to be real: what nobody sends has to be finite."""
    found = rehearse_apart(make_encoder, num_nodes=1, devices=4, rank=rank)
    held = sum(p.numel() for p in PoolingEncoder().parameters())
    assert held / 5 < found.parameters < held / 2
    assert found.memory[GRADIENTS] > 0


class Autoencoder(pl.LightningModule):
    """Its plan, which is inferred, keeps sequences whole."""

    def __init__(self):
        super().__init__()
        block = lambda: nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32))  # noqa: E731
        self.blocks = nn.Sequential(*(block() for _ in range(4)))

    def training_step(self, batch, batch_idx):
        return (self.blocks(batch) - batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


def make_autoencoder(observer, environment):
    trainer = quiet_trainer(
        strategy=Hybrid3DStrategy(tensor_parallel_size=2, pipeline_parallel_size=2),
        devices=4,
        max_steps=1,
        callbacks=[observer],
        plugins=[environment],
    )
    return trainer, Autoencoder(), DataLoader(torch.randn(16, 32), batch_size=8)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_model_whose_sequences_stay_whole_is_rehearsed(rank):
    found = rehearse_apart(make_autoencoder, num_nodes=1, devices=4, rank=rank)
    assert found.memory[GRADIENTS] > 0
    assert found.parameters < sum(p.numel() for p in Autoencoder().parameters()) / 2


def make_wide_encoder(devices, observer, environment):
    trainer = quiet_trainer(
        accelerator="cpu",
        devices=devices,
        max_steps=1,
        strategy=Hybrid3DStrategy(**({"tensor_parallel_size": 2} if devices > 1 else {})),
        callbacks=[observer],
        plugins=[environment],
    )
    return trainer, PoolingEncoder(128), labeled_tokens()


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("devices", [1, 4])
def test_parameters_made_in_the_constructor_are_fake_ones(devices):
    """They are divided as others are; at the end of a run on one device nothing has to be moved."""
    make_encoder = partial(make_wide_encoder, devices)
    found = rehearse_apart(make_encoder, num_nodes=1, devices=devices, rank=0)
    held = sum(p.numel() for p in PoolingEncoder(128).parameters())
    assert found.parameters == held if devices == 1 else found.parameters < held / 1.5
