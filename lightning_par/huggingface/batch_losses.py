"""Losses of Hugging Face models that are no mean over the samples of a batch."""

from typing import Any

from torch import nn

__all__ = ["why_whole_batch"]

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CURE = (
    "Use one replica and, under a pipeline, num_microbatches=1 (accumulate_grad_batches divides as "
    "on one process)."
)


def why_whole_batch(model: Any) -> str | None:
    """Say why a batch cannot be divided among replicas or micro-batches without changing the loss.

    Args:
        model: A `transformers.PreTrainedModel`; parameters may be on meta.

    Returns:
        The reason and the cure; None if it can be divided.
    """
    # Each of these is the loss of a whole batch: the mean over parts is another number.
    name, config = type(model).__name__, model.config
    if getattr(config, "output_router_logits", False):
        return (
            f"{name} adds an auxiliary loss of its routers, a product of means over all tokens of "
            f"a batch. Set output_router_logits=False in its configuration. {_CURE}"
        )
    # CLIP and its kind: a contrastive loss.
    if isinstance(getattr(model, "logit_scale", None), nn.Parameter) and hasattr(
        config, "vision_config"
    ):
        return f"{name} compares every sample of a batch with every other. {_CURE}"
    sums = getattr(config, "ctc_loss_reduction", None) == "sum"
    if sums and type(model).__name__.endswith("CTC"):
        return (
            f"{name} gives the sum of the losses of the samples, not their mean. Set "
            f"ctc_loss_reduction='mean' in its configuration. {_CURE}"
        )
    normalized = [n for n, m in model.named_modules() if isinstance(m, _NORMS)]
    if normalized:
        return (
            f"{name} normalizes by the statistics of a batch ({normalized[0]} is a BatchNorm). "
            f"{_CURE}"
        )
    return None
