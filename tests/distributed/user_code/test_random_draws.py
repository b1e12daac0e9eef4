"""Random numbers drawn in the step: those of one process."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par import BatchLayout, ParallelPlan
from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.user_code import Cases

CASES = Cases(__name__)


class Denoiser(PlainModule):
    """Predicts the noise that was added to the embeddings; cases draw it in other ways."""

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
        self.log("loss", loss, sync_dist=True)
        return loss


@CASES.add(
    equal="tp2_whole_sequence pp2 zero3",
    refused={"tp2": "other losses on the 2 tensor-parallel ranks.*sequence_parallel=False"},
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


@CASES.add(equal="tp2_whole_sequence", refused={"pp2 zero3": "mixes samples"})
def mixing_of_samples() -> Any:
    class Module(Denoiser):
        def noise(self, h: Tensor, batch_idx: int) -> Tensor:
            return h.detach()[torch.randperm(len(h), device=h.device)]

    return Module(), token_pairs()


@CASES.add(equal="pp2 zero3 zero0")
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
