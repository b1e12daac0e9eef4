"""Random numbers drawn in the step: those of one process; and what validation logs of them."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn, Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par import BatchLayout, Hybrid3DStrategy, ParallelPlan
from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import Cases, LAYOUTS

CASES = Cases(__name__)


class Denoiser(PlainModule):
    """Predicts the noise that was added to the embeddings; cases draw it in other ways."""

    key = "loss"

    def __init__(self, net: nn.Module | None = None, drop: float = 0.0) -> None:
        super().__init__(net)
        self.drop = nn.Dropout(drop)

    def noise(self, h: Tensor, batch_idx: int) -> Tensor:
        return torch.randn_like(h)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        h = self.net.emb(x)
        noise = self.noise(h, batch_idx)
        z = h + noise
        for block in self.net.blocks:
            z = block(z)
        loss = F.mse_loss(self.net.norm(z), noise)
        self.log(self.key, loss, sync_dist=True)
        return loss


@CASES.add(
    equal="tp2_whole_sequence pp2",
    large="zero3",
    refused={"tp2": "different losses on the 2 tensor-parallel ranks.*sequence_parallel=False"},
)
def noise_like_the_activations() -> Any:
    return Denoiser(), token_pairs()


@CASES.add(equal="pp2 zero3")
def noise_and_steps_of_diffusion() -> Any:
    class Module(Denoiser):
        def noise(self, h: Tensor, batch_idx: int) -> Tensor:
            steps = torch.randint(1, 10, (len(h),), device=h.device)
            scales = torch.rand(len(h), 1, 1, dtype=h.dtype).to(h.device)
            noise = torch.randn(h.shape, dtype=h.dtype, device=h.device)
            return noise * scales / steps[:, None, None]

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero3")
def masking_by_the_order_of_noise() -> Any:
    class Module(Denoiser):
        def noise(self, h: Tensor, batch_idx: int) -> Tensor:
            order = torch.rand(h.shape[:2], device=h.device).argsort(1)
            shown = torch.where(order < 4, 0.5, torch.rand((), dtype=h.dtype))
            return shown[..., None].expand_as(h)

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero3")
def classes_drawn_by_a_function_of_torch() -> Any:
    class Module(Denoiser):
        def noise(self, h: Tensor, batch_idx: int) -> Tensor:
            return F.gumbel_softmax(torch.zeros(h.shape, dtype=h.dtype), hard=True).to(h.device)

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero3")
def seeded_in_the_step() -> Any:
    class Module(Denoiser):
        def noise(self, h: Tensor, batch_idx: int) -> Tensor:
            torch.manual_seed(batch_idx)
            return torch.empty_like(h).normal_(0, 0.5)

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero3")
def own_generator() -> Any:
    class Module(Denoiser):
        def on_fit_start(self) -> None:
            self.generator = torch.Generator().manual_seed(5)

        def noise(self, h: Tensor, batch_idx: int) -> Tensor:
            return torch.randn(h.shape, generator=self.generator, dtype=h.dtype).to(h.device)

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero3")
def noise_for_every_token_of_the_flat_batch() -> Any:
    class Module(Denoiser):
        def noise(self, h: Tensor, batch_idx: int) -> Tensor:
            flat = h.flatten(0, 1)
            return torch.bernoulli(torch.full_like(flat, 0.3)).view_as(h)

    return Module(), token_pairs()


@CASES.add(equal="pp2_one_microbatch tp2_whole_sequence", refused={"pp2 zero3": "NumPy or Python"})
def numbers_of_numpy_for_every_sample() -> Any:
    class Module(Denoiser):
        def noise(self, h: Tensor, batch_idx: int) -> Tensor:
            return h.new_tensor(np.random.rand(len(h), 1, 1)).expand_as(h)

    return Module(), token_pairs()


@CASES.add(equal="tp2_whole_sequence", refused={"pp2 zero3": "to shuffle the samples of a batch"})
def mixing_of_samples() -> Any:
    class Module(Denoiser):
        def noise(self, h: Tensor, batch_idx: int) -> Tensor:
            return h.detach()[torch.randperm(len(h), device=h.device)]

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero3", large="zero0")
def dropout_before_the_noise() -> Any:
    class Net(PlainNet):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Sequential(nn.Embedding(64, 32), nn.Dropout(0.5))

    class Module(Denoiser):
        def __init__(self) -> None:
            super().__init__(Net())

        def parallel_plan(self) -> Any:
            return ParallelPlan(blocks="net.blocks", batch=BatchLayout())

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero3")
def choice_by_a_random_number() -> Any:
    class Module(Denoiser):
        def noise(self, h: Tensor, batch_idx: int) -> Tensor:
            return torch.randn_like(h) if torch.rand(1) < 0.5 else torch.rand_like(h)

    return Module(), token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_equal_or_refused(case: str, layout: str, refusal: str | None) -> None:
    """Check one cell of the table."""
    CASES.check(case, layout, refusal)


class Meter:
    """Counts, as helpers of users do."""

    def __init__(self) -> None:
        self.counts = {"batches": [0]}


class Validating(Denoiser):
    """Validation draws noise, too, logs more than means, and counts in an object."""

    def __init__(self) -> None:
        super().__init__()
        self.meters = [Meter()]

    def on_validation_epoch_end(self) -> None:
        self.log("batches", float(self.meters[0].counts["batches"][0]), sync_dist=True)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.meters[0].counts["batches"][0] += 1
        self.key = "val"
        loss = self.training_step(batch, batch_idx)
        self.key = "loss"
        values = {"exp": loss.exp(), "samples": float(len(batch[0]))}
        self.log_dict(values, sync_dist=True)


def _validate(rank: int, world: int, layout: str | None) -> Any:
    seed_everything(0, verbose=False)
    samples, module = token_pairs(), Validating()
    replicas = 2 if layout == "zero1" else 1
    strategy: Any = "auto" if layout is None else Hybrid3DStrategy(**LAYOUTS[layout])

    def loader(chosen: Any) -> Any:
        sampler = (
            DistributedSampler(chosen, replicas, rank, shuffle=False) if replicas > 1 else None
        )
        return DataLoader(chosen, 8 // replicas, sampler=sampler)

    trainer = quiet_trainer(
        devices=world, strategy=strategy, precision="64-true", max_epochs=2, num_sanity_val_steps=0
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader(samples[:16]), [loader(samples[:12]), loader(samples[20:])])
    found = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return found, [str(w.message) for w in caught if "logs exp. The value" in str(w.message)]


@pytest.mark.parametrize("layout", ["pp2", "zero1", "tp2_whole_sequence"])
def test_validation_draws_and_logs_what_one_process_does(layout: str) -> None:
    wanted, _ = _validate(0, 1, None)
    torch.set_default_dtype(torch.float32)
    results = run_ranks(_validate, 2, layout, timeout=180)
    for found, _ in results:
        if layout == "zero1":  # the mean of the replicas, with a warning
            for name in (f"exp/dataloader_idx_{index}" for index in range(2)):
                assert found.pop(name) != pytest.approx(wanted[name], rel=1e-6)
                found[name] = wanted[name]
            assert len(results[0][1]) == 2
        assert found == pytest.approx(wanted, rel=1e-6)


class Augmenting(Denoiser):
    """Draws in a hook, before there is a step that could share it."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        x, y = batch
        return x.where(torch.rand(x.shape, device=x.device) > 0.1, 0), y


def _augment(rank: int, world: int, layout: str) -> list[str]:
    strategy: Any = Hybrid3DStrategy(**LAYOUTS[layout])
    trainer = quiet_trainer(devices=world, strategy=strategy, max_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Augmenting(), DataLoader(token_pairs(), 4))
    return [str(w.message) for w in caught if "draws random numbers. Each of" in str(w.message)]


@pytest.mark.parametrize(("layout", "warnings_of_ranks"), [("zero1", [1, 0]), ("pp2", [0, 0])])
def test_draws_of_hooks_on_replicas_are_told(layout: str, warnings_of_ranks: list[int]) -> None:
    found = run_ranks(_augment, 2, layout)
    assert [len(said) for said in found] == warnings_of_ranks
    assert not any(said and "on_after_batch_transfer draws" not in said[0] for said in found)
