"""A model that is too large to be whole on rank 0 is compared by blocks."""

import logging
from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor
from torch.amp import GradScaler
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_par import Hybrid3DStrategy
from lightning_par.dtensor import local_part
from lightning_par.errors import LightningParError
from lightning_par.strategies.proof import skeleton
from lightning_par.strategies.proof.by_blocks import GatheredWhenRead
from tests.support.exhaustive import some
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import own_parameters, quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS, Messages, world_of


class Plain(PlainModule):
    """May drop; the forward of blocks may change a buffer that it reads."""

    def __init__(self, *, drops: bool = False, grows: bool = False) -> None:
        super().__init__()
        self.drops = drops
        for block in self.net.blocks if grows else ():
            block.register_buffer("scale", torch.ones(()))
            block.norm.register_forward_hook(partial(_grow, block))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return F.dropout(loss.expand(4), 0.5).mean() if self.drops else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _grow(block: Any, _: Any, args: Any, output: Tensor) -> Tensor:
    scaled = output * block.scale.clone()
    block.scale *= 1.1
    return scaled


class Weights(Callback):
    """Keeps the weights after every step, on rank 0."""

    def __init__(self) -> None:
        self.found = list[dict[str, float]]()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        whole = trainer.strategy.gather_state_dict()
        self.found.append({name: float(weight.sum()) for name, weight in whole.items()})


class Doubles(Callback):
    """From a step on, lets the backward of a rank double a gradient, once or always."""

    def __init__(self, step: int, *, once: bool) -> None:
        self.step, self.once, self.calls = step, once, 0

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step != self.step or trainer.global_rank != 1:
            return
        held = own_parameters(pl_module)
        name = next(n for n in held if n.endswith("mlp.up.weight"))
        held[name].register_post_accumulate_grad_hook(self._double)

    def _double(self, parameter: Tensor) -> None:
        self.calls += 1
        if parameter.grad is None:  # on its way to the host
            return
        if not self.once or self.calls == 2:  # the second is the one that is compared
            local_part(parameter.grad).mul_(2)


def _fit(
    rank: int,
    world: int,
    layout: str,
    verify: str | bool,
    drops: bool = False,
    fault: Mapping[str, Any] | None = None,
    accumulates: int = 1,
    grows: bool = False,
    trainer: Mapping[str, Any] = MappingProxyType({"precision": "64-true"}),
    **options: Any,
) -> dict[str, Any]:
    torch.manual_seed(3)
    peaks, leave, copies = list[int](), GatheredWhenRead.__exit__, skeleton._COPIES

    def note(mode: Any, *error: object) -> None:
        peaks.append(mode.peak)
        leave(mode, *error)

    strategy = Hybrid3DStrategy(**{**LAYOUTS[layout], **options}, verify=verify)
    module, weights, messages = Plain(drops=drops, grows=grows), Weights(), Messages()
    fits = quiet_trainer(
        devices=world,
        strategy=strategy,
        max_steps=5,
        accumulate_grad_batches=accumulates,
        callbacks=[weights, *([] if fault is None else [Doubles(**fault)])],
        **trainer,
    )
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(messages)
    error = ""
    GatheredWhenRead.__exit__ = note  # type: ignore[method-assign]
    skeleton._COPIES = 2**60  # no rank has room for so many
    try:
        fits.fit(module, DataLoader(token_pairs(), 4))  # type: ignore[arg-type]
    except LightningParError as refusal:
        error = f"{refusal.code} {refusal}"
    finally:
        GatheredWhenRead.__exit__ = leave  # type: ignore[method-assign]
        skeleton._COPIES = copies
        logger.removeHandler(messages)
    return {
        "told": [text for text in messages.texts if "proved" in text or "equal" in text],
        "error": error,
        "weights": weights.found,
        "peaks": peaks,
        "steps": fits.global_step,
        "outcomes": strategy.start.proof.outcomes,
    }


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize(
    "layout", some(["tp2", "pp2", "zero1", "zero3", "zero2_offload", "tp2pp2"], ["tp2pp2", "zero1"])
)
def test_healthy_runs_are_equal_and_go_on_as_without_the_proof(layout: str, drops: bool) -> None:
    world = world_of(layout)
    found = run_ranks(_fit, world, layout, "every 2", drops, timeout=120)
    plain = run_ranks(_fit, world, layout, False, drops, timeout=120)
    for one, other in zip(found, plain, strict=True):
        assert (one["error"], one["steps"]) == ("", 5)
        assert one["weights"] == other["weights"]
    whole = sum(p.nbytes for p in Plain().double().parameters())
    told = found[0]["told"]
    assert [text.split(" is ")[0] for text in told] == ["The first step", "Step 2", "Step 4"]
    assert all("is proved in part: only loss and gradients of one batch" in t for t in told)
    assert len(found[0]["peaks"]) == 3
    assert all(0 < peak <= whole // 4 for peak in found[0]["peaks"])


@pytest.mark.parametrize("options", [{}, {"delayed_update": 1}, {"accumulate_on": "host"}])
def test_an_offloaded_optimizer_keeps_the_digits_of_its_masters(options: dict[str, Any]) -> None:
    accumulates = 2 if options.get("accumulate_on") else 1
    given = {"trainer": {"precision": "bf16-true"}, "offload_options": options}
    runs = [
        run_ranks(_fit, 2, "zero2_offload", verify, True, None, accumulates, timeout=120, **given)
        for verify in ("every 2", False)
    ]
    for one, other in zip(*runs, strict=True):
        assert (one["error"], one["steps"]) == ("", 5)
        assert one["weights"] == other["weights"]
    assert len(runs[0][0]["peaks"]) == 3


class Scaling(MixedPrecision):
    """16-mixed as on a GPU; Lightning allows it on no CPU."""

    def __init__(self, scale: float = 2.0**10) -> None:
        super().__init__("16-mixed", "cpu", GradScaler("cpu", init_scale=scale))


@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3"])
def test_a_scaled_loss_is_compared(layout: str, drops: bool) -> None:
    given = {"trainer": {"plugins": Scaling()}}
    runs = [
        run_ranks(_fit, 2, layout, verify, drops, timeout=120, **given)
        for verify in ("every 2", False)
    ]
    for one, other in zip(*runs, strict=True):
        assert (one["error"], one["steps"]) == ("", 5)
        assert one["weights"] == other["weights"]
    told = runs[0][0]["told"]
    assert [text.split(" is ")[0] for text in told] == ["The first step", "Step 2", "Step 4"]
    assert all("is proved in part: only loss and gradients of one batch" in t for t in told)


def test_a_step_whose_gradients_overflow_is_not_compared() -> None:
    given = {"trainer": {"plugins": Scaling(2.0**40)}}
    found = run_ranks(_fit, 2, "tp2", "every 4", timeout=120, **given)
    assert [(one["error"], one["steps"]) for one in found] == [("", 5)] * 2
    assert found[0]["outcomes"]["training step 0"] == (
        "not proved: gradients overflow with the present scale of the loss"
    )


@pytest.mark.parametrize("layout", ["tp2", "pp2_one_microbatch"])
def test_a_fault_is_told_with_a_scaled_loss(layout: str) -> None:
    given = {"trainer": {"plugins": Scaling()}}
    fault = {"step": 2, "once": False}
    for one in run_ranks(_fit, 2, layout, "every 2", False, fault, timeout=120, **given):
        assert one["error"].startswith("LP801"), one["error"]
        assert "mlp.up.weight" in one["error"]


def test_accumulated_batches_are_compared_by_the_first_one() -> None:
    found = run_ranks(_fit, 2, "tp2", "every 2", False, None, 2, timeout=120)
    assert [one["error"] for one in found] == ["", ""]
    assert len(found[0]["peaks"]) == 3


@pytest.mark.parametrize("layout", ["tp2", "zero3"])
def test_blocks_that_change_their_buffers_run_once(layout: str) -> None:
    found = run_ranks(_fit, 2, layout, "every 2", False, None, 1, True, timeout=120)
    assert [one["error"] for one in found] == ["", ""]
    assert len(found[0]["peaks"]) == 3


@pytest.mark.parametrize(("step", "once"), [(0, False), (2, False), (2, True)])
@pytest.mark.parametrize("layout", ["tp2", "pp2_one_microbatch", "tp2 offload"])
def test_a_fault_is_told(layout: str, step: int, once: bool) -> None:
    fault, (layout, *offload) = {"step": step, "once": once}, layout.split()
    options: dict[str, Any] = {"offload_options": {}} if offload else {}
    for one in run_ranks(_fit, 2, layout, "every 2", False, fault, timeout=120, **options):
        code = "LP807" if once else "LP801"
        assert one["error"].startswith(code), one["error"]
        assert "mlp.up.weight" in one["error"]
        assert one["steps"] == step + 1


def _fit_changed(
    rank: int, world: int, layout: str, verify: str, values: Mapping[str, Any]
) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setattr(f"lightning_par.strategies.proof.{name}", value)
        return _fit(rank, world, layout, verify)


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_first_step_that_takes_one_process_too_long_is_put_off(layout: str) -> None:
    values = {"step_proof.LONGEST": 0.0}
    found = run_ranks(_fit_changed, 2, layout, "1 %", values, timeout=120)
    assert [one["error"] for one in found] == ["", ""]
    assert [one["peaks"] for one in found] == [[], []]  # nothing was taken on one process


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_rank_that_runs_out_of_memory_trains_on(layout: str) -> None:
    values = {"by_blocks._WATCHED": 1, "by_blocks._KEPT_FREE": 2**60}
    found = run_ranks(_fit_changed, 2, layout, "every 4", values, timeout=120)
    assert [(one["error"], one["steps"]) for one in found] == [("", 5), ("", 5)]
    assert found[0]["told"] == []
    assert found[0]["outcomes"]["training step 4"].startswith(
        "not proved: the step failed on one process with MemoryError"
    )
