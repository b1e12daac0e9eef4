"""Context parallelism for the attention of Hugging Face models.

Such a model builds its causal mask for the tokens that it sees, which are those of one rank. So an
attention function of ours is registered with transformers: it takes the padding mask as it is and
calls `lightning_par.attention`. Positions come from the plan; labels are shifted before the
sequence is sharded.

Shapes: B batch, N query heads, K key/value heads, t tokens of one rank, H head dim.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn, Tensor

from lightning_par.engine.collectives import all_reduce
from lightning_par.engine.context.attention import attention
from lightning_par.engine.context.sequence_shard import SequenceShard
from lightning_par.engine.wrapping import Forward, wrap_forward
from lightning_par.errors import ConfigurationError
from lightning_par.huggingface.lookup import find_model
from lightning_par.huggingface.mixers import WholeSequences
from lightning_par.huggingface.positions import count_whole_sequences
from lightning_par.plan.parallel_plan import BatchLayout
from lightning_par.upstream.pytree import tree_map
from lightning_par.upstream.transformers import attention_of

__all__ = ["divide_attention"]

_NAME = "lightning_par"
_SINKS = "s_aux"
_BESIDE = "softcap", "sinks", "position_bias"
"""What models give their attention besides masks and windows."""


def divide_attention(
    module: nn.Module, batch: BatchLayout, axis: SequenceShard, blocks: Iterable[nn.Module] = ()
) -> None:
    """Let the Hugging Face model inside `module`, if there is one, attend over all ranks.

    Args:
        module: A LightningModule; the model inside is told to use another attention.
        batch: Batch layout of the plan, which names the padding mask.
        axis: The sequence shard of this rank.
        blocks: Those of this rank.
    """
    found = find_model(module)
    if found is None:
        return
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    # Registered on every call, which replaces the entry by itself: names are global in
    # transformers.
    AttentionInterface.register(_NAME, _attend)
    AttentionMaskInterface.register(_NAME, _pass_padding)
    _, model = found
    own = attention_of(model)
    packed = _PackedRows(model, axis)
    axis.checks.append(packed.look)
    for rotary in model.modules():
        if _scales_by_length(rotary):
            _scale_by_whole_length(rotary, axis)
    count_whole_sequences(model, axis)
    mixers = WholeSequences(blocks, axis)
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters

    def use(kind: str) -> None:
        # `set_attn_implementation` walks over all submodules.
        if attention_of(model) != kind:
            model.set_attn_implementation(kind)

    # Before the step, which then leaves no change of the config behind.
    axis.checks.append(lambda _: use(_NAME))

    def adjust(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        # Its own on whole sequences, where it may read a cache.
        use(own if axis.layout is None else _NAME)
        if axis.layout is None:
            return None
        # A cache keeps a window of one rank's tokens, and training reads none.
        given = {"use_cache": False, **kwargs} if takes_cache else dict(kwargs)
        packed.divide(args, kwargs)
        labels = given.get("labels")
        if batch.shifted is not None and labels is not None and given.get(batch.shifted) is None:
            given[batch.shifted] = labels
        mixers.take_padding(given.get("attention_mask"))
        return args, given

    model.register_forward_pre_hook(adjust, with_kwargs=True)


def _scales_by_length(module: nn.Module) -> bool:
    """Tell whether a module chooses its rotary frequencies by the largest position it is given."""
    kinds = getattr(module, "rope_type", None)
    named = kinds.values() if isinstance(kinds, Mapping) else [kinds]
    by_length = any("dynamic" in str(kind) or kind == "longrope" for kind in named)
    return by_length and "position_ids" in inspect.signature(module.forward).parameters


def _scale_by_whole_length(rotary: nn.Module, axis: SequenceShard) -> None:
    """Let a rotary embedding see the largest position of the whole sequence, beside those of the
    tokens of this rank.

    **Communicates**: in every call one all-reduce of a number over the axis.
    """

    def around(inner: Forward) -> Forward:
        # By the inner forward's names, as models give positions by place or by keyword.
        signature = inspect.signature(inner)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if axis.layout is None:
                return inner(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            places: Tensor = bound.arguments["position_ids"]
            # Reached by every rank of the axis, as all of them run the same forward.
            last = all_reduce(places.max()[None], axis.group, "max")
            # One more position, the last of the whole sequence: [.., t] becomes [.., t + 1].
            bound.arguments["position_ids"] = torch.cat(
                [places, last.expand(*places.shape[:-1], 1)], -1
            )
            found = inner(*bound.args, **bound.kwargs)
            # cos and sin, [B, t + 1, H] each.
            return tree_map(lambda t: t[..., :-1, :], found)  # without the last position

        return forward

    wrap_forward(rotary, around, "whole_length")


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers expects it: [B, N, t, H] in, [B, t, N, H] out."""
    # Each rank sees a part of the scores, and would have to drop what one process drops.
    if dropout > 0:
        raise ConfigurationError(
            "LP305",
            f"{type(module).__name__} applies dropout={dropout} to attention probabilities, which "
            "is not supported with context parallelism. Set attention_dropout (attn_pdrop, "
            "attention_probs_dropout_prob) of its configuration to 0.",
        )
    beside = [name for name in _BESIDE if others.get(name) is not None]
    if beside:
        raise ConfigurationError(
            "LP305",
            f"{type(module).__name__} passes {' and '.join(beside)} to its attention, which "
            "changes the attention scores or their softmax. This is not supported with context "
            "parallelism. Use context_parallel_size=1.",
        )
    if attention_mask is not None and attention_mask.shape[1:3] != (1, 1):
        raise ConfigurationError(
            "LP305",
            f"{type(module).__name__} computes a mask of its own, of shape "
            f"{tuple(attention_mask.shape)}, from the tokens of one rank. Context parallelism "
            "supports padding, causal attention and sliding windows. Use context_parallel_size=1.",
        )
    # As transformers' own functions decide: the argument, else the module, else causal.
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    visible = None if attention_mask is None else attention_mask[:, 0, 0]
    # As flash-attn counts: the token itself is one of so many.
    window = None if sliding_window is None else (sliding_window - 1, sliding_window - 1)
    options: dict[str, Any] = {"key_mask": visible, "window": window, "scale": scaling}
    options["sinks"] = others.get(_SINKS)
    out = attention(query, key, value, causal=bool(causal), **options)
    return out.transpose(1, 2).contiguous(), None


def _pass_padding(*_: Any, attention_mask: Tensor | None = None, **__: Any) -> Tensor | None:
    """Return the mask [B, t] that the caller gave as [B, 1, 1, t]; it must not depend on what a
    rank sees.
    """
    return None if attention_mask is None else attention_mask.bool()[:, None, None]


class _PackedRows:
    """Divides the attention of rows with several documents, which transformers finds by positions
    that do not increase by 1.

    Args:
        model: A `transformers.PreTrainedModel`.
        axis: The sequence shard of this rank; it is told the documents.
    """

    def __init__(self, model: Any, axis: SequenceShard) -> None:
        self._axis = axis
        self._is_packed = False
        self._signature = inspect.signature(model.forward)
        text = getattr(model.config, "text_config", model.config)
        # None: the model reads no cache.
        self._uses_cache: bool | None = getattr(text, "use_cache", None)
        if "use_cache" not in self._signature.parameters:
            self._uses_cache = None
        self._takes_positions = attention_of(model).startswith("flash")

    def look(self, batch: Any) -> None:
        """Note whether a whole batch, before it is divided, has rows of several documents."""
        self._is_packed = False
        # With a mask that is given, transformers does not look for documents in the positions.
        if not isinstance(batch, Mapping) or batch.get("attention_mask") is not None:
            return
        positions = batch.get("position_ids")
        if isinstance(positions, Tensor) and positions.ndim == 2:
            self._is_packed = bool((torch.diff(positions, dim=-1) != 1).any())

    def divide(self, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Tell attention the documents, in a forward of the model, which may be of a micro-batch.

        Args:
            args: Arguments of the forward.
            kwargs: Its keyword arguments.

        **Communicates**: one all-gather of the positions over the axis, if the batch is packed.
        """
        self._axis.documents = ()
        if not self._is_packed:
            return
        given = self._signature.bind_partial(*args, **kwargs).arguments
        positions = given.get("position_ids")
        if positions is None:
            return
        uses_cache = given.get("use_cache", self._uses_cache)
        if self._uses_cache is None or (uses_cache and self._takes_positions):
            raise ConfigurationError(
                "LP305",
                "position_ids of this batch do not always increase by 1 inside a row, so "
                "transformers treats the row as several documents. Context parallelism cannot "
                "divide such rows for this model. Set use_cache=False in the configuration of the "
                "model, if it has a cache, or use context_parallel_size=1, or put one document in "
                "each row.",
            )
        # Beside a cache, transformers does not look for documents.
        if not uses_cache:
            self._axis.documents = _documents(self._axis.gather_tensor(positions, 1))


def _documents(positions: Tensor) -> list[tuple[int, ...]]:
    """Return the boundaries 0, ..., T of the documents in every row.

    Args:
        positions: [B, T].
    """
    begins = (torch.diff(positions, dim=-1) != 1).cpu()
    starts = [(row.nonzero()[:, 0] + 1).tolist() for row in begins]
    return [(0, *row, positions.shape[1]) for row in starts]
