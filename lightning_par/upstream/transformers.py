"""What models of transformers say of themselves in private attributes.

Attributes of instances: looked up when they are used, so that nothing imports transformers.
"""

from collections.abc import Iterable
from typing import Any

from torch import nn

from lightning_par.upstream.presence import names_of

__all__ = ["attention_of", "ignored_keys", "mark_as_expert_parallel"]


def attention_of(model: Any) -> str:
    """Return the name of the attention that a model computes; only how to set it is public.

    Args:
        model: A `PreTrainedModel`.
    """
    with names_of("transformers"):
        return str(model.config._attn_implementation)


def ignored_keys(model: Any) -> Iterable[str]:
    """Return patterns of stored names that `from_pretrained` leaves out without a warning.

    Args:
        model: A `PreTrainedModel`.
    """
    with names_of("transformers"):
        return model._keys_to_ignore_on_load_unexpected or ()


def mark_as_expert_parallel(module: nn.Module) -> None:
    """Let fused kernels skip tokens with an index one past the last expert.

    transformers sets it where it shards experts itself. Modules that do not know it are left alone,
    they have no such kernel.

    Args:
        module: Holds experts, of transformers or not.
    """
    if hasattr(module, "_is_expert_parallel"):
        # Past `Module.__setattr__`, which looks through parameters and buffers first.
        module.__dict__["_is_expert_parallel"] = True
