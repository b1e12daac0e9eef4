"""Reference BERT: a plain one-device encoder with a `ParallelPlan`.

Shapes: B batch, T tokens, D model dim, N heads, H head dim, V vocabulary.
"""

import re
from collections.abc import Mapping

import torch
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par.models.bert.config import BertConfig
from lightning_par.models.layers import head_logits
from lightning_par.plan.parallel_plan import BatchLayout, ParallelPlan, TensorStyle

__all__ = ["Bert", "EncoderBlock", "from_hugging_face_bert"]


class SelfAttention(nn.Module):
    """Bidirectional self-attention with a padding mask.

    `num_heads` is read at every call: tensor parallelism lowers it to the local number of heads.

    Args:
        config: Configuration of the model.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        dim = config.model_dim
        self.num_heads, self.head_dim = config.num_heads, dim // config.num_heads
        self.dropout = config.dropout
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.value, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, hidden: Tensor, visible: Tensor | None = None) -> Tensor:
        """Attend to every visible token.

        Args:
            hidden: [B, T, D].
            visible: [B, 1, 1, T], bool, False for padding; None: no padding.

        Returns:
            [B, T, D].
        """
        query, key, value = (
            part(hidden).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        rate = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=visible, dropout_p=rate)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """MLP ``down(gelu(up(x)))`` with the exact (erf) GELU.

    Args:
        config: Configuration of the model.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.model_dim, config.ff_dim)
        self.down = nn.Linear(config.ff_dim, config.model_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, T, D] to [B, T, D]."""
        out: Tensor = self.down(F.gelu(self.up(hidden)))
        return out


class EncoderBlock(nn.Module):
    """Post-norm encoder layer: ``h = norm(h + attention(h))``, then ``norm(h + mlp(h))``.

    Args:
        config: Configuration of the model.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        dim, eps = config.model_dim, config.norm_eps
        self.attention = SelfAttention(config)
        self.attention_norm = nn.LayerNorm(dim, eps=eps)
        self.mlp = FeedForward(config)
        self.mlp_norm = nn.LayerNorm(dim, eps=eps)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, visible: Tensor | None = None) -> Tensor:
        """Map [B, T, D] to [B, T, D].

        Args:
            hidden: [B, T, D].
            visible: [B, 1, 1, T], bool, False for padding; None: no padding.
        """
        hidden = self.attention_norm(hidden + self.drop(self.attention(hidden, visible)))
        out: Tensor = self.mlp_norm(hidden + self.drop(self.mlp(hidden)))
        return out


class OrderHead(nn.Module):
    """Sentence-order head: classifies the hidden state of the first token, as BERT's NSP head.

    Args:
        config: Configuration of the model.
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.pool = nn.Linear(config.model_dim, config.model_dim)
        self.classify = nn.Linear(config.model_dim, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        """Map [B, T, D] to logits [B, 2]."""
        out: Tensor = self.classify(self.pool(hidden[:, 0]).tanh())
        return out


class Bert(nn.Module):
    """Bidirectional encoder with a masked-token head and, optionally, a sentence-order head.

    Args:
        config: Sizes, heads and initialization.

    **Source**: Devlin et al. (1810.04805), section 3.

    Examples:
        >>> hidden, order = Bert(BertConfig.preset("tiny"))(torch.zeros(2, 5, dtype=torch.int64))
        >>> hidden.shape, order.shape
        (torch.Size([2, 5, 260]), torch.Size([2, 2]))
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        dim, eps = config.model_dim, config.norm_eps
        self.embed = nn.Embedding(config.vocab_size, dim)
        self.position = nn.Embedding(config.max_length, dim)
        self.segment = nn.Embedding(config.num_segments, dim)
        self.embed_norm = nn.LayerNorm(dim, eps=eps)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_layers))
        self.transform = nn.Linear(dim, dim)
        self.transform_norm = nn.LayerNorm(dim, eps=eps)
        self.head = nn.Linear(dim, config.vocab_size)
        self.head.weight = self.embed.weight
        self.order = OrderHead(config) if config.order_head else None
        self._initialize()

    def _initialize(self) -> None:
        """Draw matrices and tables from N(0, init_std), zero the biases; norms keep their ones."""
        # One in-place call per parameter: deferred initialization replays them one by one.
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=self.config.init_std)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def forward(
        self,
        input_ids: Tensor,
        segment_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the logits of every token, and of the order of the segments.

        Args:
            input_ids: [B, T], int64, 0 .. V - 1.
            segment_ids: [B, T], int64, 0 .. num_segments - 1; None: all 0.
            attention_mask: [B, T], 0 or False for padding; None: no padding. Every row needs a
                visible token.
            position_ids: [B or 1, T], int64; None: 0 .. T - 1.

        Returns:
            Token logits [B, T, V], and order logits [B, 2] or None without an order head.
        """
        if segment_ids is None:
            segment_ids = torch.zeros_like(input_ids)
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        hidden = self.embed(input_ids) + self.position(position_ids) + self.segment(segment_ids)
        hidden = self.drop(self.embed_norm(hidden))
        visible = None if attention_mask is None else attention_mask[:, None, None].bool()
        for block in self.blocks:
            hidden = block(hidden, visible)
        order = None if self.order is None else self.order(hidden)
        hidden = self.transform_norm(F.gelu(self.transform(hidden)))
        return head_logits(self.head, hidden, chunked=self.config.chunked_loss), order

    def parallel_plan(self) -> ParallelPlan:
        """Return the parallel plan: blocks, tensor styles, tied weights and batch spec."""
        tensor: dict[str, TensorStyle] = {
            "embed": "vocab_embedding",
            "position": "split_sequence",
            "segment": "split_sequence",
            "embed_norm": "sequence_parallel",
            "blocks.*.attention": "gather_sequence",
            "blocks.*.attention.query": "colwise",
            "blocks.*.attention.key": "colwise",
            "blocks.*.attention.value": "colwise",
            "blocks.*.attention.out": "rowwise",
            "blocks.*.attention_norm": "sequence_parallel",
            "blocks.*.mlp": "gather_sequence",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "blocks.*.mlp_norm": "sequence_parallel",
            "transform": "sequence_parallel",
            "transform_norm": "sequence_parallel",
            "head": "vocab_head",
        }
        if self.order is not None:
            tensor["order"] = "whole_sequence"
            tensor["order.pool"] = tensor["order.classify"] = "replicated"
        # Without an order head the labels are made before the sequences are sharded, hence sharded
        # with them; with one, the label is a number per sample.
        sequences = ["input_ids", "segment_ids", "attention_mask", "maskable"]
        labels = "sentence_order"
        if self.order is None:
            labels = "labels"
            sequences.append(labels)
        return ParallelPlan(
            blocks="blocks",
            tied=(("embed.weight", "head.weight"),),
            tensor=tensor,
            divided={"blocks.*.attention": ("num_heads",)},
            batch=BatchLayout(sequence_dims=dict.fromkeys(sequences, 1), labels=labels),
            checkpointable=("blocks.*.attention", "blocks.*.mlp"),
            positions={"": "position_ids"},
        )


# Pattern of a name in transformers -> name here; the first match counts.
_HUGGING_FACE = (
    (r"bert\.embeddings\.word_embeddings\.", "embed."),
    (r"bert\.embeddings\.position_embeddings\.", "position."),
    (r"bert\.embeddings\.token_type_embeddings\.", "segment."),
    (r"bert\.embeddings\.LayerNorm\.", "embed_norm."),
    (r"bert\.encoder\.layer\.(\d+)\.attention\.self\.", r"blocks.\1.attention."),
    (r"bert\.encoder\.layer\.(\d+)\.attention\.output\.dense\.", r"blocks.\1.attention.out."),
    (r"bert\.encoder\.layer\.(\d+)\.attention\.output\.LayerNorm\.", r"blocks.\1.attention_norm."),
    (r"bert\.encoder\.layer\.(\d+)\.intermediate\.dense\.", r"blocks.\1.mlp.up."),
    (r"bert\.encoder\.layer\.(\d+)\.output\.dense\.", r"blocks.\1.mlp.down."),
    (r"bert\.encoder\.layer\.(\d+)\.output\.LayerNorm\.", r"blocks.\1.mlp_norm."),
    (r"bert\.pooler\.dense\.", "order.pool."),
    (r"cls\.seq_relationship\.", "order.classify."),
    (r"cls\.predictions\.transform\.dense\.", "transform."),
    (r"cls\.predictions\.transform\.LayerNorm\.", "transform_norm."),
    (r"cls\.predictions\.decoder\.", "head."),
    (r"cls\.predictions\.bias$", "head.bias"),
)


def from_hugging_face_bert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of a `Bert` from that of a `BertForPreTraining` of the same sizes.

    Args:
        state: `state_dict()` of the transformers model. Entries that a `Bert` does not have, such
            as position buffers, are left out.
    """
    renamed = {}
    for name, value in state.items():
        for pattern, place in _HUGGING_FACE:
            new, hits = re.subn("^" + pattern, place, name)
            if hits:
                renamed[new] = value
                break
    return renamed
