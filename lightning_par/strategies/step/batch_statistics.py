"""BatchNorm on a mesh: statistics over the samples of all replicas, or a refusal."""

from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par.engine.collectives import all_reduce, apply_function
from lightning_par.engine.wrapping import Forward, wrap_forward, wrappers_of
from lightning_par.errors import ConfigurationError
from lightning_par.mesh import ParallelMesh
from lightning_par.upstream.lightning import synchronizes_batchnorm, trainer_of

__all__ = [
    "check_batch_statistics",
    "refuse_parts",
    "synchronize_batchnorm",
    "training_batchnorms",
]

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
_WRAPPER = "synchronized_batchnorm"


def training_batchnorms(module: nn.Module) -> list[str]:
    """Return the names of BatchNorm layers in training mode, which normalize over the batch."""
    named = module.named_modules()
    return [
        name
        for name, part in named
        if isinstance(part, BatchNorm | nn.SyncBatchNorm) and part.training
    ]


def check_batch_statistics(module: nn.Module, mesh: ParallelMesh, microbatches: int) -> None:
    """Refuse BatchNorm that would take a part of the samples for the batch.

    Args:
        module: In the state of a training step; layers in evaluation mode use running statistics.
        mesh: Its replicas see other samples.
        microbatches: Number of micro-batches of a batch.

    Raises:
        ConfigurationError: A layer normalizes over the batch, on whatever stage.

    **Communicates**: the names of these layers, over the pipeline stages.
    """
    replicas = mesh.sizes.data
    if replicas == 1 and microbatches == 1:
        return
    layers = training_batchnorms(module)
    # Synchronized statistics join ranks that run at the same time. Micro-batches run one after
    # the other: the first is normalized before the last is known, so that nothing helps there.
    if microbatches == 1:
        layers = [name for name in layers if not _is_synchronized(module.get_submodule(name))]
    # A stage sees its own layers only, and a stage that raised alone would leave the others
    # waiting for its activations: so all of them learn every name first.
    if mesh.sizes.pipeline > 1:
        boxes: list[Any] = [None] * mesh.sizes.pipeline
        dist.all_gather_object(boxes, layers, group=mesh.group("pp"))
        layers = list(dict.fromkeys(name for box in boxes for name in box))
    refuse_parts(layers, replicas, microbatches)


def refuse_parts(layers: list[str], replicas: int, microbatches: int) -> None:
    """Refuse layers, if there are any, that would take a part of the samples for the batch.

    Args:
        layers: Their names.
        replicas: That see other samples.
        microbatches: Number of micro-batches of a batch.

    Raises:
        ConfigurationError: There is a layer.
    """
    if not layers:
        return
    more = f" and {len(layers) - 1} more" if len(layers) > 1 else ""
    seen = f"{microbatches} micro-batches" if microbatches > 1 else f"{replicas} replicas"
    cures = ["use num_microbatches=1"] if microbatches > 1 else []
    if replicas > 1:
        cures.append(
            "pass sync_batchnorm=True to the Trainer, which computes the statistics over all "
            "replicas"
        )
    raise ConfigurationError(
        "LP312",
        f"BatchNorm {layers[0]!r}{more} normalizes over the batch, but each of {seen} has only "
        "some of its samples, so the result would differ from that of a run on one process. To "
        f"get the same result, {' and '.join(cures)}; or use GroupNorm or LayerNorm; or freeze the "
        "layer with eval(). To accept the statistics of some samples, as DDP does, declare "
        "ParallelPlan(batch=BatchLayout(local_statistics=True)). No weight was changed.",
    )


def _is_synchronized(layer: nn.Module) -> bool:
    return _WRAPPER in wrappers_of(layer) or isinstance(layer, nn.SyncBatchNorm)


def synchronize_batchnorm(module: nn.Module, mesh: ParallelMesh) -> None:
    """Make BatchNorm layers use the statistics of all replicas (and context ranks) in training, if
    the Trainer was told to.

    Unlike `torch.nn.SyncBatchNorm`, it runs on CPUs, too, and the layers stay what they are.

    Args:
        module: Its BatchNorm layers get another forward.
        mesh: Its token group has the samples of one batch.
    """
    trainer = trainer_of(module) if isinstance(module, pl.LightningModule) else None
    if trainer is None or not synchronizes_batchnorm(trainer.strategy):
        return
    for part in module.modules():
        if isinstance(part, BatchNorm):
            wrap_forward(part, partial(_synchronized, part, mesh.token_group), _WRAPPER)


def _synchronized(layer: BatchNorm, group: Any, _: Forward) -> Forward:
    return partial(_normalize, layer, group)


def _normalize(layer: BatchNorm, group: Any, x: Tensor) -> Tensor:
    """Return what the layer gives for the joined batches of all ranks of a group.

    **Communicates**: one all-reduce of 2 C + 1 numbers, and one in the backward.
    """
    uses_batch = layer.training or layer.running_mean is None
    if not uses_batch:
        return F.batch_norm(
            x, layer.running_mean, layer.running_var, layer.weight, layer.bias, eps=layer.eps
        )
    # x: [B, C, ...]; statistics are over all dims but C.
    dims = [dim for dim in range(x.ndim) if dim != 1]
    shape = [1, -1, *[1] * (x.ndim - 2)]
    # Squares of float16 overflow above 256, and sums in bfloat16 keep 8 bits.
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    # The count is summed with the values: replicas may have unequal numbers of samples.
    count = wide.new_tensor([float(x.numel() // x.shape[1])])
    sums = torch.cat([wide.sum(dims), count])
    sums = apply_function(_SumOverGroup, sums, group)
    total = sums[-1].detach()
    mean = sums[:-1] / total
    # A second pass over the deviations loses no digits where the mean is large.
    squares = apply_function(_SumOverGroup, (wide - mean.view(shape)).square().sum(dims), group)
    variance = squares / total
    # As F.batch_norm does: it normalizes by the biased variance, and keeps the unbiased one.
    if layer.training and layer.track_running_stats and layer.running_mean is not None:
        _track(layer, mean.detach(), variance.detach() * total / (total - 1).clamp(min=1))
    out = (wide - mean.view(shape)) * (variance + layer.eps).rsqrt().view(shape)
    if layer.weight is not None:
        out = out * layer.weight.view(shape) + layer.bias.view(shape)
    return out.to(x.dtype)


@torch.no_grad()
def _track(layer: BatchNorm, mean: Tensor, variance: Tensor) -> None:
    assert layer.running_mean is not None
    assert layer.running_var is not None
    factor = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        # momentum=None is torch's cumulative average: every batch so far weighs the same.
        if factor is None:
            factor = 1.0 / float(layer.num_batches_tracked)
    factor = 0.0 if factor is None else factor
    layer.running_mean.lerp_(mean.to(layer.running_mean.dtype), factor)
    layer.running_var.lerp_(variance.to(layer.running_var.dtype), factor)


class _SumOverGroup(torch.autograd.Function):
    """Sum over a group whose ranks have losses of their own: gradients are summed, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return all_reduce(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        # The losses of all ranks depend on the sum, so that d(their sum)/dx is the sum of the
        # gradients. Through `apply_function`, to be differentiated twice for a gradient penalty.
        return apply_function(_SumOverGroup, grad, ctx.group), None
