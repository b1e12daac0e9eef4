"""Logits in chunks for models of transformers, by the head of the model."""

from typing import Any

from torch import nn

from lightning_par.engine.tensor.chunked_logits import ChunkedHead, LossOptions
from lightning_par.errors import ConfigurationError

__all__ = ["chunk_loss"]


def chunk_loss(model: Any, *, chunk_size: int | None = None) -> None:
    """Let the loss of a model compute its logits in chunks of tokens, so that they are never whole.

    What else reads ``outputs.logits`` gets the whole ones, and so does a loss behind another
    operation, such as the soft cap of Gemma 2.

    Args:
        model: A `transformers.PreTrainedModel` with an `nn.Linear` as its head, such as one for
            causal or masked language modeling; changed in place.
        chunk_size: Tokens whose logits are there at once; None: as in `linear_cross_entropy`.

    Raises:
        ConfigurationError: The model has no such head.

    Examples:
        >>> self.model = AutoModelForCausalLM.from_config(config)
        >>> lightning_par.huggingface.chunk_loss(self.model)
    """
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigurationError(
            "LP902",
            "chunk_loss() needs a model whose head is an nn.Linear, but the head of "
            f"{type(model).__name__} is {type(head).__name__}. Call chunk_loss() on a model for "
            "causal or masked language modeling, before adapters are added.",
        )
    # Its class and not a wrapper: a copy of the model has a head of its own.
    chunked: Any = head
    chunked.__class__, chunked.options = ChunkedHead, LossOptions(chunk_size=chunk_size)
