"""Reference GPT: a plain one-device decoder with a `ParallelPlan`.

Shapes: B batch, T tokens, D model dim, H head dim, V vocabulary, L layers.
"""

import math
from collections.abc import Sequence

import torch
from torch import nn, Tensor

from lightning_par.errors import ConfigurationError
from lightning_par.models.gpt.config import GPTConfig
from lightning_par.models.layers import (
    Attention,
    GeluMLP,
    head_logits,
    KeyValueCache,
    make_norm,
    RotaryEmbedding,
    SwiGLU,
)
from lightning_par.plan.parallel_plan import BatchLayout, ParallelPlan, TensorStyle

__all__ = ["GPT", "Block"]

_RESIDUAL = ("attention.out.weight", "mlp.down.weight")
"""Weights that write to the residual stream, which start smaller."""


class Block(nn.Module):
    """Pre-norm decoder layer: ``h = h + attention(norm(h))``, then ``h + mlp(norm(h))``.

    Args:
        config: Configuration of the model.

    Examples:
        >>> block = Block(GPTConfig.preset("tiny"))
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        dim, ff_dim = config.model_dim, config.ff_dim
        assert ff_dim is not None
        mlp = SwiGLU if config.activation == "swiglu" else GeluMLP
        self.attention_norm = make_norm(config.norm, dim, eps=config.norm_eps, bias=config.bias)
        self.attention = Attention(
            dim, config.num_heads, config.kv_heads, bias=config.bias, dropout=config.dropout
        )
        self.mlp_norm = make_norm(config.norm, dim, eps=config.norm_eps, bias=config.bias)
        self.mlp = mlp(dim, ff_dim, bias=config.bias, dropout=config.dropout)

    def forward(
        self,
        hidden: Tensor,
        rotary: Tensor | None = None,
        documents: Sequence[Sequence[int]] | None = None,
        cache: KeyValueCache | None = None,
        layer_idx: int = 0,
    ) -> Tensor:
        """Map [B, T, D] to [B, T, D].

        Args:
            hidden: [B, T, D].
            rotary: Cosines and sines [2, B or 1, 1, T, H]; None with learned positions.
            documents: For each row the boundaries of its documents; None: a row is one.
            cache: See `GPT.forward`.
            layer_idx: Number of the block in the cache.

        Returns:
            [B, T, D].
        """
        given = () if cache is None else (cache, layer_idx)
        hidden = hidden + self.attention(self.attention_norm(hidden), rotary, documents, *given)
        result: Tensor = hidden + self.mlp(self.mlp_norm(hidden))
        return result


class GPT(nn.Module):
    """Decoder-only language model.

    Args:
        config: Sizes, kinds of layers and initialization.

    **Source**: Radford et al. 2019 (GPT-2): pre-norm blocks, weights from N(0, 0.02), those that
    write to the residual stream from N(0, 0.02 / sqrt(2 L)).

    Examples:
        >>> GPT(GPTConfig.preset("tiny"))(torch.zeros(2, 5, dtype=torch.int64)).shape
        torch.Size([2, 5, 256])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        learned = config.positions == "learned"
        dim = config.model_dim
        self.embed = nn.Embedding(config.vocab_size, dim)
        self.position = nn.Embedding(config.max_length, dim) if learned else None
        self.drop = nn.Dropout(config.dropout)
        self.rotary = None if learned else RotaryEmbedding(config.head_dim, theta=config.rope_theta)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = make_norm(config.norm, dim, eps=config.norm_eps, bias=config.bias)
        self.head = nn.Linear(dim, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight
        self._initialize()

    def _initialize(self) -> None:
        """Draw the weights, zero the biases; norms keep their ones."""
        # One in-place call per parameter: deferred initialization replays them one by one.
        std = self.config.init_std
        for name, parameter in self.named_parameters():
            if name.endswith(_RESIDUAL):
                nn.init.normal_(parameter, std=std / math.sqrt(2 * self.config.num_layers))
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=std)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:
        """Return the logits of the next token at every position.

        Args:
            input_ids: [B, T], int64, 0 .. V - 1.
            position_ids: [B or 1, T], int64; None: they follow those of the cache, from 0 on.
            cu_seqlens: [B, K], int64: boundaries 0, ..., T of the documents that are packed into
                each row, none of which sees another; T may come several times. None: a row is one
                document.
            cache: Keys and values of earlier tokens of the same rows, which gets those of these
                tokens; to generate text, without a backward. None: these are the first.

        Returns:
            Logits [B, T, V].

        Raises:
            ConfigurationError: Positions are learned and T is greater than `max_length`.
        """
        past = 0 if cache is None else cache.get_seq_length()
        if position_ids is None:
            end = past + input_ids.shape[1]
            position_ids = torch.arange(past, end, device=input_ids.device)[None]
        hidden = self.embed(input_ids)
        if self.position is not None:
            self._check_length(past + input_ids.shape[1])
            hidden = hidden + self.position(position_ids)
        hidden = self.drop(hidden)
        # Once for all blocks: under sequence or context parallelism a block sees only a part of the
        # tokens and could not tell their positions.
        rotary = None if self.rotary is None else self.rotary(position_ids)
        # Numbers, from which attention knows what to compute and to send: one wait for all blocks.
        documents = None if cu_seqlens is None else cu_seqlens.tolist()
        for number, block in enumerate(self.blocks):
            given = () if cache is None else (cache, number)
            hidden = block(hidden, rotary, documents, *given)
        return head_logits(self.head, self.norm(hidden), chunked=self.config.chunked_loss)

    def _check_length(self, length: int) -> None:
        if length > self.config.max_length:
            raise ConfigurationError(
                "LP912",
                f"the input has {length} tokens, but the model has learned positions for "
                f"max_length={self.config.max_length} tokens only. Shorten the input, or use a "
                "larger max_length.",
            )

    @torch.no_grad()
    def generate(
        self,
        input_ids: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
    ) -> Tensor:
        """Sample a continuation.

        Args:
            input_ids: Prompt [B, T], int64, T >= 1; the last `max_length` tokens are the context.
            max_new_tokens: Number of tokens to append.
            temperature: Divisor of the logits, 0 or more; 0 is greedy decoding.
            top_k: Number of most likely tokens to sample from, 1 or more; None: all.
            generator: Random generator on the device of `input_ids`; None: torch's default.
            use_cache: Whether keys and values are kept, so that a token costs the forward of one
                token. Without it, and beyond `max_length`, it costs that of the whole context.

        Returns:
            [B, T + max_new_tokens], int64.

        Raises:
            ConfigurationError: `temperature` is negative, `top_k` is less than 1, or T is 0.
        """
        if temperature < 0 or (top_k is not None and top_k < 1) or input_ids.shape[1] < 1:
            raise ConfigurationError(
                "LP912",
                "generate() needs temperature >= 0, top_k >= 1 or None, and a prompt of 1 token "
                f"or more, but got temperature={temperature}, top_k={top_k} and "
                f"{input_ids.shape[1]} tokens.",
            )
        was_training = self.training
        self.eval()
        try:
            cache = KeyValueCache(self.config.num_layers) if use_cache else None
            for _ in range(max_new_tokens):
                context = input_ids[:, -self.config.max_length :]
                # The window moves with the text; positions count from its beginning.
                if cache is not None and context.shape[1] == input_ids.shape[1]:
                    logits = self(context[:, cache.get_seq_length() :], cache=cache)[:, -1]
                else:
                    logits = self(context)[:, -1]
                chosen = _sample(logits, temperature, top_k, generator)
                input_ids = torch.cat((input_ids, chosen), dim=1)
        finally:
            self.train(was_training)
        return input_ids

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the unsharded model, whatever part of it this rank holds."""
        return self.config.num_parameters

    def flops_per_token(self, length: int) -> int:
        """Return the FLOPs of training per token; see `GPTConfig.flops_per_token`.

        Args:
            length: T.
        """
        return self.config.flops_per_token(length)

    def parallel_plan(self) -> ParallelPlan:
        """Return the parallel plan: blocks, tensor styles, tied weights and batch spec."""
        # With sequence parallelism, hidden states between attention and MLP are sharded over the
        # tokens, as in Megatron: the norms run on shards, "gather_sequence" modules gather them.
        tensor: dict[str, TensorStyle] = {
            "embed": "vocab_embedding",
            "blocks.*.attention_norm": "sequence_parallel",
            "blocks.*.attention": "gather_sequence",
            "blocks.*.attention.query": "colwise",
            "blocks.*.attention.key": "colwise",
            "blocks.*.attention.value": "colwise",
            "blocks.*.attention.out": "rowwise",
            "blocks.*.mlp_norm": "sequence_parallel",
            "blocks.*.mlp": "gather_sequence",
            "blocks.*.mlp.up": "colwise",
            "blocks.*.mlp.down": "rowwise",
            "norm": "sequence_parallel",
            "head": "vocab_head",
        }
        if self.config.positions == "learned":
            tensor["position"] = "split_sequence"
        if self.config.activation == "swiglu":
            tensor["blocks.*.mlp.gate"] = "colwise"
        return ParallelPlan(
            blocks="blocks",
            tied=(("embed.weight", "head.weight"),) if self.config.tied_head else (),
            tensor=tensor,
            divided={"blocks.*.attention": ("num_heads", "num_kv_heads")},
            batch=BatchLayout(
                sequence_dims={"input_ids": 1, "labels": 1, "position_ids": 1},
                optional=("position_ids",),
                labels="labels",
                ignore_index=-100,
            ),
            checkpointable=("blocks.*.attention", "blocks.*.mlp"),
            positions={"": "position_ids"},
        )


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Sample one token per row of logits [B, V]; returns [B, 1]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        # Logits equal to the k-th stay in as well.
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
