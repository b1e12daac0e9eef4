"""A loss or gradient that is not finite on one rank is refused, or left out, on every rank."""

import re
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor

import lightning_par
from lightning_par.errors import ConfigurationError, NonFiniteError
from tests.contract.subject import LAYOUTS
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import own_parameters, quiet_trainer
from tests.support.ranks.api import run_ranks


class Poisoned(ToyModule):
    """In its second step, the loss or one gradient of one rank is not finite."""

    def __init__(self, rank: int, what: str) -> None:
        super().__init__()
        self.rank, self.what = rank, what

    def on_train_start(self) -> None:
        # Not in the step, where a loss that depends on the rank is refused.
        self.is_hit = dist.get_rank() == self.rank

    def hits(self) -> bool:
        return self.is_hit and self.trainer.global_step == 1

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if self.what == "loss" and self.hits() else loss

    def on_after_backward(self) -> None:
        # Under a pipeline hooks of all ranks do the same, and the last stage holds the weight.
        is_staged = self.trainer.strategy.sizes.pipeline > 1 and self.trainer.global_step == 1
        if self.what == "gradient" and (is_staged or self.hits()):
            with torch.no_grad():
                # A norm is replicated under tp, hence counted on one rank only.
                local = self.model.blocks[-1].norm2.bias.grad
                getattr(local, "to_local", lambda: local)().fill_(float("nan"))


def weights(module: Any) -> dict[int, Tensor]:
    """Id of a parameter -> its value; a hook may find a tied one under another name."""
    own = own_parameters(module).values()
    local = {id(p): getattr(p, "to_local", lambda p=p: p)() for p in own}
    # On the CPU, where they are after a run on one device.
    return {key: t.detach().cpu().clone() for key, t in local.items()}


class Before(Callback):
    """Keeps the weights before every step."""

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, index: int) -> None:
        self.kept = weights(pl_module)


def fit(
    world: int, layout: str, rank: int, what: str, choice: str, **trainer: Any
) -> tuple[str, bool, int]:
    """What was raised, whether the weights are those before the bad step, and the steps made."""
    strategy = lightning_par.Hybrid3DStrategy(
        **LAYOUTS.get(layout, {}),
        on_nonfinite=choice,
        timeout=timedelta(minutes=5),
        gather_after_run=False,
    )
    module, before = Poisoned(rank, what), Before()
    made = quiet_trainer(
        devices=world, strategy=strategy, max_steps=2, callbacks=[before], **trainer
    )
    said = ""
    try:
        made.fit(module, loader(ToyData(8), 2))
    except NonFiniteError as error:
        said = str(error)
    now = weights(module)
    same = now.keys() == before.kept.keys() and all(
        torch.equal(before.kept[key], value) for key, value in now.items()
    )
    return said, same, made.global_step


def on_rank(rank: int, world: int, layout: str) -> dict[str, Any]:
    last = world - 1
    return {
        "loss": fit(world, layout, last, "loss", "raise"),
        "gradient": fit(world, layout, last, "gradient", "raise", gradient_clip_val=1.0),
        "skip": fit(world, layout, last, "gradient", "skip", gradient_clip_val=1.0),
        "ignore": fit(world, layout, last, "gradient", "ignore"),
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_bad_rank_is_refused_or_skipped_on_every_rank(layout: str) -> None:
    axis = {"tp2": "tp", "pp2": "pp", "dp2": "dp_shard"}[layout]
    results = run_ranks(on_rank, 2, layout, timeout=120)
    for result in results:
        for kind in ("loss", "gradient"):
            said, same, steps = result[kind]
            assert said.startswith(
                "step 1: the loss or a gradient is not finite (the norm of the loss and all "
                "gradients is nan)"
            ), said
            assert f"rank 1 ({axis} 1) has a {kind} of" in said
            assert "No weight was changed" in said
            assert same
            assert steps == 1
        assert "norm2.bias" in result["gradient"][0]
        assert result["skip"] == ("", True, 2)
        assert result["ignore"][:2] == ("", False)
    assert [r["loss"][0] for r in results] == [results[0]["loss"][0]] * 2


def test_one_device_refuses_too() -> None:
    ((said, same, steps),) = run_ranks(one_rank, 1)
    assert re.match(
        r"step 1: the loss or a gradient is not finite \(the norm of the loss and all gradients is "
        r"nan\): rank 0 has a loss of inf",
        said,
    )
    assert (same, steps) == (True, 1)


def one_rank(rank: int, world: int) -> tuple[str, bool, int]:
    return fit(world, "one", 0, "loss", "raise")


def test_unknown_choice_is_refused() -> None:
    says = r"on_nonfinite='stop' must be 'raise', 'skip' or 'ignore'\."
    with pytest.raises(ConfigurationError, match=says):
        lightning_par.Hybrid3DStrategy(on_nonfinite="stop")


def timeouts(rank: int, world: int) -> list[float]:
    """The timeout of every group that a run uses, in seconds."""
    options = {"tensor_parallel_size": 1, "pipeline_parallel_size": 2, "data_parallel_size": 2}
    strategy = lightning_par.Hybrid3DStrategy(**options, timeout=timedelta(seconds=77))
    made = quiet_trainer(devices=world, strategy=strategy, max_steps=1)
    made.fit(ToyModule(blocks=2), loader(ToyData(8), 2))
    groups = {"world": dist.group.WORLD, **strategy.parallel_model.groups}
    groups |= {f"shared {i}": s.group for i, s in enumerate(strategy.parallel_model.shared)}
    assert {"world", "pp", "dp_shard", "pp activations", "pp gradients", "shared 0"} <= set(groups)
    cpu = torch.device("cpu")
    return [g._get_backend(cpu).options._timeout.total_seconds() for g in groups.values()]


def test_timeout_reaches_every_group() -> None:
    for found in run_ranks(timeouts, 4, fresh=True, timeout=120):
        assert set(found) == {77.0}
