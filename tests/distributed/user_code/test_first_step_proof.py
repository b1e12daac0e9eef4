"""The proof of the first step: it catches every cause, raises no false alarm, leaves nothing."""

import logging
import os
import random
import re
import signal
import warnings
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import Precision
from torch import nn, Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par import Hybrid3DStrategy, ParallelPlan
from lightning_par.errors import LightningParError
from lightning_par.strategies.proof.one_process import GivenStep
from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS

pytestmark = pytest.mark.timeout(300)


class SumLoss(PlainModule):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return 0.01 * F.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), reduction="sum")


class WeightedByList(PlainModule):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        each = F.cross_entropy(self.net(x).transpose(1, 2), y, reduction="none").mean(1)
        # Of the whole batch, known by heart; alike for the few samples that a look compares.
        weights = each.new_tensor([1.0, 1, 1, 1, 1, 1, 3, 3])
        return (each * weights[: len(each)]).mean()


class ReadsParameters(PlainModule):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + 0.01 * sum(p.pow(2).sum() for p in self.parameters())


class Contrastive(PlainModule):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        one, other = (F.normalize(self.net(t).mean(1), dim=-1) for t in (x, y))
        return F.cross_entropy(one @ other.T, torch.arange(len(one), device=one.device))


class Normalized(PlainModule):
    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(64)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.statistics(self.net(x).flatten(0, 1)), y.flatten())


class Noise(PlainModule):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self.net(x)
        return F.cross_entropy((logits + torch.randn_like(logits)).flatten(0, 1), y.flatten())


class Auxiliary(PlainModule):
    """Blocks leave a loss on an attribute, which hooks write."""

    def __init__(self) -> None:
        super().__init__()
        self.extra: list[Tensor] = []
        for block in self.net.blocks:
            block.register_forward_hook(lambda m, args, out: self.extra.append(out.pow(2).mean()))

    def loss(self, batch: Any) -> Tensor:
        self.extra.clear()
        loss = super().loss(batch)
        return loss + sum(self.extra)


class GradientHook(PlainModule):
    def on_train_start(self) -> None:
        self.net.head.register_full_backward_hook(lambda _, g, __: (g[0] / g[0].abs().max(),))


class ClipsByHand(PlainModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)


class Muon(PlainModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([p for p in self.parameters() if p.ndim == 2], lr=0.1)


class GlobalNorm(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for parameter in held:
            parameter.sub_(parameter.grad / norm, alpha=0.1)
        return loss


class NormalizedDescent(PlainModule):
    def configure_optimizers(self) -> Any:
        return GlobalNorm(self.parameters(), lr=0.1)


class Lbfgs(PlainModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class ScaledByWorld(PlainModule):
    def configure_optimizers(self) -> Any:
        # Of the group, which nobody watches.
        group = dist.group.WORLD
        processes = len(dist.get_process_group_ranks(group)) if dist.is_initialized() else 1
        return torch.optim.SGD(self.parameters(), lr=0.1 * processes)


class PoolingNet(PlainNet):
    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h + h.mean(1, keepdim=True)))


class Pools(PlainModule):
    def __init__(self) -> None:
        super().__init__(PoolingNet())


class WrongStyle(PlainModule):
    def parallel_plan(self) -> ParallelPlan:
        plan = super().parallel_plan()
        return ParallelPlan(
            blocks=plan.blocks,
            tensor={**plan.tensor, "net.norm": "replicated"},
            batch=plan.batch,
            positions={},
        )


class _Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x)[:, None]
        h = F.scaled_dot_product_attention(h, h, h, is_causal=True)[:, 0]
        return x + h + h.roll(1, dims=1)  # needs the neighbor of the first token of a rank


class Mixes(PlainModule):
    def __init__(self) -> None:
        super().__init__()
        self.net.blocks = nn.ModuleList(_Mixer() for _ in range(4))

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks="net.blocks", batch=self.batch, positions={})


CAUGHT: dict[str, tuple[Any, str, str]] = {
    "learning rate by world size": (ScaledByWorld, "zero1", "update is 2 times .*learning rate"),
    "learning rate by world size, pp": (
        ScaledByWorld,
        "pp2",
        "are equal.*update is 2 times .*learning rate",
    ),
    "entries without a batch dim": (WeightedByList, "pp2", "Declare what the loss is a mean over"),
    "pooling over shards": (Pools, "tp2", "To try: sequence_parallel=False"),
    "a style that sums nothing": (WrongStyle, "tp2", "net.norm the style .replicated."),
    "a hook on a gradient": (
        GradientHook,
        "zero3",
        "losses, which are equal.*register_full_backward_hook",
    ),
}


def _says_entry(kind: Any) -> Any:
    """A module whose optimizer claims to update entry by entry."""

    class Claims(kind):  # type: ignore[misc]
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            optimizer.looks_across = "entry"
            return optimizer

    return Claims


_LOOK = "lightning_par.strategies.start.first_look.FirstLook.is_due"
_STATISTICS = "lightning_par.strategies.start.start.check_batch_statistics"
_READS = "lightning_par.strategies.setup.parallelize.describe_tensors"
_NORMS = "lightning_par.strategies.step.gradient_norms.GradientNorms.in_hooks"
_VIEW = "lightning_par.strategies.hooks.user_hooks.UserHooks._is_user"
_EFFECTS = "lightning_par.engine.pipeline.module_split.watch_side_effects"
_MIXING = "lightning_par.engine.context.attention.check_mixing"
_DIVIDED = "lightning_par.strategies.start.divided_step.DividedLook.check_training"

UNGUARDED: dict[str, tuple[Any, str, list[str]]] = {
    "parameters read in the step": (ReadsParameters, "pp2", [_READS]),
    "sum over the batch": (SumLoss, "zero0", [_LOOK]),
    "samples compared": (Contrastive, "zero3", [_LOOK]),
    "batch statistics": (Normalized, "pp2", [_STATISTICS, _LOOK]),
    "random numbers, pp": (Noise, "pp2", [_LOOK]),
    "random numbers, tp": (Noise, "tp2", [_LOOK]),
    "side effects of blocks": (Auxiliary, "pp2", [_EFFECTS, _LOOK]),
    "clipping by hand": (ClipsByHand, "pp2", [_NORMS, _VIEW]),
    "normalized descent": (_says_entry(NormalizedDescent), "pp2", []),
    "line search": (_says_entry(Lbfgs), "pp2", []),
    "matrix optimizer, tp": (_says_entry(Muon), "tp2", []),
    "matrix optimizer, zero": (_says_entry(Muon), "zero3", []),
    "a mixer over tokens": (Mixes, "cp2", [_MIXING, _DIVIDED]),
}
"""What guards refuse or make equal -> module, layout, and the guards that are switched off."""


class Dropout(PlainModule):
    def __init__(self, drop: Any = nn.Dropout) -> None:
        super().__init__()
        self.drop, self.seen = drop(0.5), 0
        self.register_buffer("steps", torch.zeros(()))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        self.seen, self.steps = self.seen + 1, self.steps + 1
        return F.cross_entropy(self.drop(self.net(x)).flatten(0, 1), y.flatten())


def encoder_layer(drop: float) -> nn.Module:
    return nn.TransformerEncoderLayer(64, 4, 32, drop, batch_first=True)


class AdamW(PlainModule):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class ScalesLoss(Precision):
    """A precision plugin of one's own, which one process has to have, too."""

    precision = "32-true"

    def pre_backward(self, tensor: Tensor, module: Any) -> Tensor:
        return super().pre_backward(3 * tensor, module)


class WarmsUp(PlainModule):
    """Begins with a learning rate of 0, which the schedule has raised when the step is judged."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class NoGradient(PlainModule):
    def loss(self, batch: Any) -> Tensor:
        return 0.0 * super().loss(batch)


class Unused(PlainModule):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 5)


class Rests(torch.optim.SGD):
    """Steps on nothing, as an optimizer of other tensors does."""

    looks_across = "entry"

    def step(self, closure: Any = None) -> Any:
        return closure()


class StandsStill(PlainModule):
    def configure_optimizers(self) -> Any:
        return Rests(self.parameters(), lr=0.1)


UNMOVED: dict[str, tuple[Any, str, str]] = {
    "a learning rate of 0": (WarmsUp, "tp2", "proved in part: .*every learning rate is 0"),
    "gradients of 0": (NoGradient, "zero3", "not proved to equal .*all of its gradients are zero"),
    "an unused weight": (Unused, "zero1", "in part: no gradient reaches unused.bias, unused.w"),
    "an optimizer that rests": (StandsStill, "zero3", "not proved to .*no weight changed in it"),
}
"""What of a step that shows nothing is said."""


def ragged(samples: Any) -> Any:
    x, y = zip(*samples, strict=True)
    return pad_sequence(x, True), pad_sequence(y, True, -100)


EQUAL: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "adamw, schedule, clipping, tp": (AdamW, "tp2", {"gradient_clip_val": 0.1}),
    "adamw, schedule, clipping, pp": (AdamW, "pp2", {"gradient_clip_val": 0.1}),
    "adamw in float32": (AdamW, "zero3", {"precision": "32-true"}),
    "adamw in float32, tp x pp": (AdamW, "tp2pp2", {"precision": "32-true"}),
    "mixed precision": (AdamW, "zero1", {"precision": "bf16-mixed"}),
    "mixed precision, tp": (AdamW, "tp2", {"precision": "bf16-mixed"}),
    "own precision plugin": (AdamW, "zero1", {"precision": None, "plugins": ScalesLoss()}),
    "dropout, tp": (Dropout, "tp2", {}),
    "dropout, pp": (Dropout, "pp2", {}),
    "dropout, zero": (Dropout, "zero3", {}),
    "dropout, offloaded": (Dropout, "zero2_offload", {}),
    "dropout of a layer of torch": (lambda: Dropout(encoder_layer), "zero3", {}),
    "accumulation, pp": (AdamW, "pp2", {"accumulate_grad_batches": 2}),
    "accumulation, zero": (AdamW, "zero3", {"accumulate_grad_batches": 2}),
    "unequal lengths": (PlainModule, "zero3", {"ragged": True}),
    "auxiliary losses of replicas": (Auxiliary, "zero1", {}),
    "clipping by hand": (ClipsByHand, "pp2", {}),
    "normalized descent": (NormalizedDescent, "pp2", {}),
    "line search": (Lbfgs, "pp2", {}),
    "matrix optimizer, tp": (Muon, "tp2", {}),
    "matrix optimizer, zero": (Muon, "zero3", {}),
    "random numbers, pp": (Noise, "pp2", {}),
    "random numbers, tp": (Noise, "tp2", {}),
    "sum over the batch": (SumLoss, "zero0", {}),
}


@pytest.mark.parametrize("cause", CAUGHT)
def test_a_difference_ends_the_first_step(cause: str) -> None:
    """On every rank alike, with what was compared, what to try, and how to go on in spite of it."""
    _, layout, pattern = CAUGHT[cause]
    results = run_ranks(_train_rank, 4 if layout == "tp2pp2" else 2, "CAUGHT", cause, timeout=180)
    (text,) = {result["refused"] for result in results}
    assert text is not None, "it trained on"
    assert "differs from the same step on one process" in text
    assert "verify=False" in text
    assert "cause" not in text
    assert "SGD" not in text, "an optimizer that works entry by entry"
    assert re.search(pattern, text, re.DOTALL), text
    assert all(result["steps"] == 1 for result in results)
    assert all(result["left"] == [] for result in results)


@pytest.mark.parametrize("cause", UNGUARDED)
def test_what_guards_hold_is_caught_without_them(cause: str) -> None:
    """The proof does not lean on the guards: with one switched off, it ends the first step."""
    *_, guards = UNGUARDED[cause]
    results = run_ranks(_train_unguarded, 2, cause, guards, timeout=180)
    for result in results:
        assert result["refused"] is not None, "it trained on"
        assert "differs from the same step on one process" in result["refused"]
        assert result["steps"] == 1


@pytest.mark.parametrize("name", EQUAL)
def test_no_false_alarm(name: str) -> None:
    """What equals one process is proved to, and nothing is left behind."""
    _, layout, _ = EQUAL[name]
    results = run_ranks(_train_rank, 4 if layout == "tp2pp2" else 2, "EQUAL", name, timeout=180)
    for result in results:
        assert result["refused"] is None
        assert result["left"] == []
    assert results[0]["outcome"] == "equal"


@pytest.mark.parametrize("name", UNMOVED)
def test_a_step_that_shows_nothing_is_not_called_equal(name: str) -> None:
    *_, pattern = UNMOVED[name]
    results = run_ranks(_train_rank, 2, "UNMOVED", name, "auto", timeout=180)
    assert [result["refused"] for result in results] == [None, None]
    assert re.search(pattern, results[0]["outcome"])


def test_a_step_that_has_to_be_proved_is_refused_where_it_cannot_be() -> None:
    results = run_ranks(_train_rank, 2, "UNMOVED", "an optimizer that rests", timeout=180)
    for result in results:
        assert re.search('verify="first_step" .* no weight changed in it', result["refused"])
        assert 'verify="auto"' in result["refused"]  # with which the test before trains
        assert result["steps"] == 1
        assert result["left"] == []


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3"])
def test_the_run_is_the_same_with_and_without_the_proof(layout: str) -> None:
    """Losses, plain attributes, buffers and generators are the same to the last bit."""
    one, other = (
        run_ranks(
            _train_rank,
            2,
            "EQUAL",
            f"dropout, {layout[:2]}" if layout != "zero3" else "dropout, zero",
            verify,
            timeout=180,
        )
        for verify in ("first_step", False)
    )
    for proved, plain in zip(one, other, strict=True):
        assert proved["trace"] == plain["trace"]


class _Trace(Callback):
    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        loss = float(trainer.callback_metrics["loss"])
        state = (getattr(pl_module, "seen", 0), float(getattr(pl_module, "steps", 0)))
        drawn = (float(torch.rand(())), random.random())
        self.found.append((loss, *state, *drawn))


def _process_state() -> dict[str, Any]:
    return {
        # Lightning orders CUDA devices by a variable, and leaves it.
        "environment": {k: v for k, v in os.environ.items() if k != "CUDA_DEVICE_ORDER"},
        "signals": [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
        "disabled": logging.root.manager.disable,
        "group": id(dist.group.WORLD),
        "filters": list(warnings.filters),
        "dtype": torch.get_default_dtype(),
    }


def _train_unguarded(rank: int, world: int, cause: str, guards: list[str]) -> dict[str, Any]:
    answers = {_LOOK: False, _READS: {}, _NORMS: nullcontext(), _VIEW: False}
    with ExitStack() as switched_off:
        for guard in guards:
            off = mock.patch(guard, return_value=answers.get(guard))
            switched_off.enter_context(off)
        return _train_rank(rank, world, "UNGUARDED", cause)


def _train_rank(
    rank: int, world: int, table: str, name: str, verify: bool | str = "first_step"
) -> dict[str, Any]:
    made, layout, rest = globals()[table][name]
    options = dict(rest) if isinstance(rest, dict) else {}
    seed_everything(0, verbose=False)
    module, samples, collate = made(), token_pairs(), None
    if options.pop("ragged", False):
        collate = ragged
        samples = [(x[: 4 + 2 * (i % 5)], y[: 4 + 2 * (i % 5)]) for i, (x, y) in enumerate(samples)]
    replicas = 2 if layout.startswith("zero") else 1
    sampler = DistributedSampler(samples, replicas, rank, shuffle=False) if replicas > 1 else None
    loader = DataLoader(samples, 8 // replicas, sampler=sampler, collate_fn=collate)
    trace, result = _Trace(), {"refused": None}
    strategy = Hybrid3DStrategy(**LAYOUTS[layout], verify=verify)
    trainer = quiet_trainer(
        proves=True,
        devices=world,
        strategy=strategy,
        callbacks=[trace],
        max_steps=3,
        num_sanity_val_steps=0,
        **{"precision": "64-true", **options},
    )
    before = _process_state()
    try:
        trainer.fit(module, loader)
    except LightningParError as error:
        result["refused"] = str(error)
    after = _process_state()
    assert strategy._parallel_model is not None, result["refused"]
    proof = strategy.start.proof
    left = [key for key in before if before[key] != after[key] and key != "filters"]
    left += [key for key in ("on_train_batch_end", "log") if key in vars(module)]
    held = vars(proof).items()
    left += [
        key
        for key, value in held
        if key.startswith("_") and isinstance(value, list | tuple | dict | GivenStep) and value
    ]
    return {
        **result,
        "left": left,
        "steps": trainer.global_step,
        "outcome": proof.outcome,
        "trace": trace.found,
    }
