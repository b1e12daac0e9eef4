"""A model whose gradients are worth compressing, and what each method should make of them."""

import math
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import lightning_par
from tests.support.parity import quiet_trainer

WIDTH, STEPS, EACH, RATE = 64, 6, 4, 0.5


class Layers(pl.LightningModule):
    """Two maps whose matrices are worth a low rank, and SGD, which hides nothing of a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.spare = nn.Parameter(torch.ones(3))  # nobody uses it
        self.more = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y) + self.more

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE)


def samples(rank: int, world: int, steps: int = STEPS) -> TensorDataset:
    """Those of one replica, every one of the others' between two of them."""
    generator = torch.Generator().manual_seed(9)
    shape = steps * EACH * world, WIDTH
    x, y = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in "xy")
    return TensorDataset(x[rank::world], y[rank::world])


def batches(rank: int, world: int, steps: int = STEPS) -> "DataLoader[Any]":
    return DataLoader(samples(rank, world, steps), EACH)


def replicas(chosen: Any, **options: Any) -> Any:
    """A strategy of whole replicas that compresses."""
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "zero_stage": 0}
    return lightning_par.Hybrid3DStrategy(**sizes, gradient_compression=chosen, **options)


def fit(rank: int, world: int, chosen: Any, **options: Any) -> pl.Trainer:
    """Train `Layers` in float64 on whole replicas that compress."""
    data = options.pop("data", None) or batches(rank, world)
    path = options.pop("ckpt_path", None)
    options = {"precision": "64-true", "max_epochs": 1, "devices": world, **options}
    strategy = replicas(chosen, **options.pop("strategy", {}))
    trainer = quiet_trainer(strategy=strategy, use_distributed_sampler=False, **options)
    trainer.fit(Layers(), data, ckpt_path=path)
    return trainer


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def of_torch(rank: int, world: int, method: str, start: int) -> dict[str, Tensor]:
    """Weights that `DistributedDataParallel` and the hooks of torch give for the same batches."""
    module = Layers().double()
    module.spare.requires_grad_(False)
    wrapped = DistributedDataParallel(module)
    if method == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            dist.group.WORLD,
            matrix_approximation_rank=4,
            start_powerSGD_iter=start,
        )
        # The bases that ours begins with; what torch draws, it draws for each step.
        state.p_memory_dict[0] = torch.empty(2 * 4 * WIDTH, dtype=torch.float64)
        drawn = [torch.randn(WIDTH, 4, dtype=torch.float64, generator=_seeded(i)) for i in (0, 1)]
        state.q_memory_dict[0] = torch.cat([q.flatten() for q in drawn])
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
        # By its own name, torch allows "bf16" on GPUs only.
        wrapped.register_comm_hook(
            dist.group.WORLD, lambda state, bucket: hooks[method](state, bucket)
        )
    optimizer = module.configure_optimizers()
    for x, y in batches(rank, world):
        optimizer.zero_grad()
        F.mse_loss(wrapped(x), y).backward()
        optimizer.step()
    return weights(module)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_definition(world: int, method: str, density: float) -> dict[str, Tensor]:
    """Weights after the same batches, with every replica computed here, entry by entry."""
    module = Layers().double()
    parameters = [module.second.bias, module.second.weight, module.first.bias, module.first.weight]
    entries = sum(p.numel() for p in parameters)
    errors = [torch.zeros(entries, dtype=torch.float64) for _ in range(world)]
    part = 256 * math.ceil(entries / (256 * world))
    made = torch.zeros(part * world, dtype=torch.float64)
    for step in zip(*(batches(rank, world) for rank in range(world)), strict=True):
        sent = []
        for rank, (x, y) in enumerate(step):
            grads = torch.autograd.grad(F.mse_loss(module(x), y), parameters)
            total = torch.cat([g.flatten() for g in grads]) + errors[rank]
            keeps = _largest(total, density) if method == "topk" else _eight_bits(total)
            errors[rank] = total - keeps
            sent.append(keeps)
        mean = sum(sent) / world
        if method == "int8":
            padded = torch.zeros_like(made)
            padded[:entries] = mean
            rounded = _eight_bits(padded + made)
            made = padded + made - rounded
            mean = rounded[:entries]
        with torch.no_grad():
            pieces = mean.split([p.numel() for p in parameters])
            for parameter, piece in zip(parameters, pieces, strict=True):
                parameter -= RATE * piece.view_as(parameter)
    return weights(module)


def _largest(total: Tensor, density: float) -> Tensor:
    order = sorted(range(len(total)), key=lambda i: -abs(float(total[i])))
    keeps = torch.zeros_like(total)
    for place in order[: math.ceil(density * len(total))]:
        keeps[place] = total[place]
    return keeps


def _eight_bits(total: Tensor) -> Tensor:
    keeps = torch.zeros_like(total)
    for start in range(0, len(total), 256):
        block = total[start : start + 256]
        scale = float((block.abs().max() / 127).float())
        if scale:
            keeps[start : start + 256] = (block / scale).round() * scale
    return keeps
