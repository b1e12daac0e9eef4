"""MixedPrecision on a mesh: overflows are decided together, masters are sharded, sums are short."""

from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_par import Hybrid3DStrategy
from lightning_par.callbacks import MixedPrecision
from lightning_par.dtensor import local_part
from lightning_par.engine.data.gradient_reduction import local_gradients
from lightning_par.models import GPTModule
from lightning_par.observe.live_bytes import LiveBytes
from lightning_par.strategies.setup import block_wrapping
from lightning_par.upstream.functions import replaced
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import own_parameters, quiet_trainer, Recorder
from tests.support.ranks.api import ranks, run_ranks
from tests.support.samples import byte_loader

SMALL = 2**-18
"""Of the loss: without scaling, what goes from block to block is zero in float16."""
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (1, {"tensor_parallel_size": 2, "pipeline_parallel_size": 1}),
    "pp2": (1, {"tensor_parallel_size": 1, "pipeline_parallel_size": 2}),
    "pp2 zb-h1": (
        1,
        {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "schedule": "zb-h1"},
    ),
    "zero3": (2, {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 3}),
}
BOTH = {"tp2pp2": (1, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2})}


class Small(ToyModule):
    """A small loss, whose gradients are stepped along at full size."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * SMALL

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1 / SMALL)


class Overflow(Callback):
    """Lets one gradient of one rank overflow in the second step; records scales and weights."""

    def __init__(self, rank: int) -> None:
        self.rank, self.scales, self.weights = rank, [], []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        sizes = getattr(trainer.strategy, "sizes", None)
        if trainer.fit_loop.total_batch_idx != 1:
            return
        if sizes is not None and sizes.pipeline > 1:  # hooks of all ranks do the same
            list(pl_module.parameters())[-1].grad.fill_(float("inf"))  # of rank 1
        elif trainer.global_rank == self.rank:
            held = (p for p in pl_module.parameters() if p.grad is not None)
            local_gradients([next(held)])[0].view(-1)[0] = float("inf")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.scales.append(trainer.precision_plugin.scaler.get_scale())
        parameters = [p.detach() for p in own_parameters(pl_module).values()]
        self.weights.append(
            [(p.to_local() if isinstance(p, DTensor) else p).clone() for p in parameters]
        )


def train_scaled(
    strategy: Any, devices: int, batch_size: int, rank: int, init_scale: float
) -> dict[str, Any]:
    """Four steps, the second of which overflows on `rank`."""
    recorder, overflow = Recorder(), Overflow(rank)
    torch.manual_seed(4)
    precision = MixedPrecision("16-mixed", init_scale=init_scale, growth_interval=2)
    made = quiet_trainer(
        strategy=strategy,
        devices=devices,
        max_epochs=1,
        log_every_n_steps=1,
        gradient_clip_val=1e3,
        use_distributed_sampler=False,
        callbacks=[precision, overflow, recorder],
    )
    data = ToyData(16)
    if devices > 1 and made.strategy.sizes.data > 1:
        place = made.strategy.sizes.data_rank(made.global_rank)
        data.ids = data.ids.view(4, 2, 2, -1)[:, place].flatten(0, 1)
    module = Small(blocks=4)
    made.fit(module, loader(data, batch_size), loader(ToyData(4), batch_size))
    return {
        "scales": overflow.scales,
        "kept": [
            all(map(torch.equal, one, two))
            for one, two in zip(overflow.weights, overflow.weights[1:], strict=False)
        ],
        "gradients": recorder.gradients[0],
        "losses": recorder.losses,
        "logged": {k: float(v) for k, v in made.callback_metrics.items() if "precision" in k},
    }


def train_on_mesh(rank: int, world: int, options: dict[str, Any], batch: int, scale: float) -> Any:
    return train_scaled(Hybrid3DStrategy(**options), world, batch, 1, scale)


@cache
def one_process(scale: float) -> dict[str, Any]:
    return train_scaled("auto", 1, 4, 0, scale)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_on_one_rank_leaves_the_step_out_on_every_rank(layout: str) -> None:
    """Bounds of float16: 2^-11 a rounding, a few in every sum."""
    replicas, options = LAYOUTS[layout]
    wanted = one_process(2.0**16)
    assert wanted["scales"] == [2.0**16, 2.0**15, 2.0**15, 2.0**16]
    for result in run_ranks(train_on_mesh, 2, options, 4 // replicas, 2.0**16, timeout=120):
        assert result["scales"] == wanted["scales"]
        assert result["kept"] == wanted["kept"] == [True, False, False]
        assert result["logged"]["precision/skipped_steps"] == 1
        assert result["logged"]["precision/loss_scale"] == 2.0**16
        assert 0 <= result["logged"]["precision/underflow"] < 0.5
        torch.testing.assert_close(result["losses"], wanted["losses"], rtol=2e-3, atol=0)
        largest = max(grad.norm() for grad in wanted["gradients"].values())
        for name, grad in result["gradients"].items():
            known = name if name in wanted["gradients"] else "model.embed.weight"
            want = wanted["gradients"][known]
            # That of a key's bias is zero, up to what is lost of the others.
            assert (grad - want).norm() <= 1e-2 * want.norm() + 1e-4 * largest, name


def test_a_scale_that_is_too_large_shrinks_as_in_one_process() -> None:
    """The loss overflows wherever it is scaled, until the scale fits."""
    wanted = one_process(2.0**60)
    assert wanted["kept"] == [True] * 3
    for layout in ("pp2", "zero3"):
        replicas, options = LAYOUTS[layout]
        for result in run_ranks(train_on_mesh, 2, options, 4 // replicas, 2.0**60, timeout=120):
            assert result["scales"] == wanted["scales"] == [2.0**n for n in (59, 58, 57, 56)]
            assert result["kept"] == wanted["kept"]
            assert result["logged"]["precision/skipped_steps"] == 4


def train_masters(strategy: Any, devices: int, batch_size: int) -> dict[str, Any]:
    torch.manual_seed(4)
    recorder = Recorder()
    module = ToyModule(blocks=4)
    made = quiet_trainer(
        strategy=strategy,
        devices=devices,
        max_epochs=1,
        callbacks=[MixedPrecision("bf16-true"), recorder],
    )
    made.fit(module, loader(ToyData(12), batch_size), loader(ToyData(4), batch_size))
    states = made.optimizers[0].state
    pairs = list(states.items())  # the module itself is whole again
    return {
        "losses": recorder.losses,
        "dtypes": {(p.dtype, s["master"].dtype, s["exp_avg"].dtype) for p, s in pairs},
        "rounded": all(
            torch.equal(_local(p).cpu(), _local(s["master"]).cpu().bfloat16()) for p, s in pairs
        ),
        "shapes": all(_local(p).shape == _local(s["master"]).shape for p, s in pairs),
        "sharded": any(_local(p).shape != p.shape for p, _ in pairs),
    }


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def masters_on_mesh(rank: int, world: int, options: dict[str, Any], batch: int) -> dict[str, Any]:
    return train_masters(Hybrid3DStrategy(**options), world, batch)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3"])
def test_masters_are_in_float32_and_sharded_like_their_weights(layout: str) -> None:
    replicas, options = LAYOUTS[layout]
    short = (torch.bfloat16, torch.float32, torch.float32)
    for result in run_ranks(masters_on_mesh, 2, options, 4 // replicas, timeout=120):
        assert result["dtypes"] == {short}
        assert result["rounded"]
        assert result["shapes"]
        assert result["sharded"] == (layout != "pp2")
        if replicas == 1:
            wanted = train_masters("auto", 1, 4)
            assert wanted["dtypes"] == {short}
            torch.testing.assert_close(result["losses"], wanted["losses"], rtol=2e-2, atol=6e-2)


class FirstGradients(Callback):
    """Keeps whether every gradient of the first step is a number of bfloat16."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        grads = local_gradients(list(pl_module.parameters()))
        self.short = [torch.equal(g, g.bfloat16().to(g.dtype)) for g in grads]


@ranks(2)
@pytest.mark.parametrize("reduce_dtype", [None, "bfloat16"])
def test_replicas_sum_gradients_in_the_chosen_dtype(
    rank: int, world: int, reduce_dtype: Any
) -> None:
    seen = FirstGradients()
    precision = MixedPrecision("bf16-mixed", reduce_dtype=reduce_dtype)
    strategy = Hybrid3DStrategy(**LAYOUTS["zero3"][1])
    made = quiet_trainer(strategy=strategy, devices=2, max_steps=1, callbacks=[precision, seen])
    made.fit(ToyModule(blocks=2), loader(ToyData(8), 4))
    assert all(seen.short) == (reduce_dtype == "bfloat16")


class PeakOfBackward(Callback):
    """Notes how many bytes forward and backward of the second step take."""

    def __init__(self, live: LiveBytes) -> None:
        self._live, self._held, self.taken = live, 0, 0

    def on_train_batch_start(self, *_: Any) -> None:
        self._held = self._live.peak = self._live.now

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.taken = self._live.peak - self._held


def taken_by_a_step(layout: str, world: int, *, again: bool) -> tuple[int, int, list[float]]:
    replicas, options = (LAYOUTS | BOTH)[layout]
    module = GPTModule(overrides={"num_layers": 8, "model_dim": 128})
    with LiveBytes() as live, ExitStack() as stack:
        if not again:
            stack.enter_context(replaced(block_wrapping, "cast_again", lambda *_, **__: None))
        seen, record = PeakOfBackward(live), Recorder()
        trainer = quiet_trainer(
            strategy=Hybrid3DStrategy(**options, num_microbatches=4 // replicas, verify=False),
            devices=world,
            max_steps=2,
            precision="bf16-mixed",
            callbacks=[seen, record],
        )
        trainer.fit(module, byte_loader(batch_size=4 // replicas))
    parameters = [local_part(p).numel() for p in own_parameters(module.model.blocks).values()]
    return seen.taken, 2 * sum(parameters), record.losses


@pytest.mark.parametrize("layout", ["pp2", "zero3", "tp2pp2"])
def test_no_step_holds_casts_of_all_its_weights(layout: str) -> None:
    """Under a pipeline of two stages the first has two micro-batches in flight."""
    world = 4 if layout == "tp2pp2" else 2
    results = run_ranks(taken_with_and_without, world, layout)
    (kept, _, wanted), (taken, casts, losses) = results[0]
    assert kept - taken > 0.4 * casts
    assert losses == wanted


def taken_with_and_without(rank: int, world: int, layout: str) -> list[Any]:
    return [taken_by_a_step(layout, world, again=again) for again in (False, True)]
