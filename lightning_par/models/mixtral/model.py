"""Reference Mixtral: a plain one-device mixture-of-experts decoder with a `ParallelPlan`.

Shapes: B batch, T tokens, D model dim, E experts, V vocabulary, L layers.
"""

import math
import re
from collections.abc import Mapping, Sequence

import torch
from torch import nn, Tensor

from lightning_par.models.layers import Attention, head_logits, make_norm, RotaryEmbedding
from lightning_par.models.mixtral.config import MixtralConfig
from lightning_par.models.mixtral.moe import MoELayer
from lightning_par.plan.parallel_plan import BatchLayout, ParallelPlan, TensorStyle

__all__ = ["Mixtral", "MixtralBlock", "from_hugging_face_mixtral"]

_RESIDUAL = ("attention.out.weight", "moe.experts.down.weight", "moe.shared.down.weight")
"""Weights that write to the residual stream, which start smaller."""


class MixtralBlock(nn.Module):
    """Pre-norm decoder layer: ``h = h + attention(norm(h))``, then ``h + moe(norm(h))``.

    Args:
        config: Configuration of the model.
    """

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        dim, eps = config.model_dim, config.norm_eps
        self.attention_norm = make_norm(config.norm, dim, eps=eps, bias=False)
        self.attention = Attention(dim, config.num_heads, config.kv_heads, dropout=config.dropout)
        self.moe_norm = make_norm(config.norm, dim, eps=eps, bias=False)
        self.moe = MoELayer(config)
        self.drop = nn.Dropout(config.dropout)

    def forward(
        self,
        hidden: Tensor,
        rotary: Tensor,
        noise: Tensor | None = None,
        counted: Tensor | None = None,
        documents: Sequence[Sequence[int]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Map [B, T, D] to [B, T, D].

        Args:
            hidden: [B, T, D].
            rotary: Cosines and sines [2, B or 1, 1, T, H].
            noise: [B, T, E]; see `Router.forward`.
            counted: [B, T], bool; see `Router.forward`.
            documents: For each row the boundaries of its documents; None: a row is one.

        Returns:
            [B, T, D], and balance loss and z-loss of the router, [2].
        """
        hidden = hidden + self.attention(self.attention_norm(hidden), rotary, documents)
        mixed, losses = self.moe(self.moe_norm(hidden), noise, counted)
        return hidden + self.drop(mixed), losses


class Mixtral(nn.Module):
    """Decoder-only language model whose MLPs are mixtures of experts.

    Args:
        config: Sizes, routing, load balancing and initialization.

    **Source**: Jiang et al. (2401.04088). Weights as in `GPT`.

    Examples:
        >>> logits, losses = Mixtral(MixtralConfig.preset("tiny"))(torch.zeros(2, 5).long())
        >>> logits.shape, losses.shape
        (torch.Size([2, 5, 256]), torch.Size([2]))
    """

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.model_dim
        self.embed = nn.Embedding(config.vocab_size, dim)
        self.drop = nn.Dropout(config.dropout)
        self.rotary = RotaryEmbedding(config.head_dim, theta=config.rope_theta)
        self.blocks = nn.ModuleList(MixtralBlock(config) for _ in range(config.num_layers))
        self.norm = make_norm(config.norm, dim, eps=config.norm_eps, bias=False)
        self.head = nn.Linear(dim, config.vocab_size, bias=False)
        if config.tied_head:
            self.head.weight = self.embed.weight
        self._initialize()

    def _initialize(self) -> None:
        """Draw the weights; norms keep their ones."""
        # One in-place call per parameter: deferred initialization replays them one by one.
        std = self.config.init_std
        for name, parameter in self.named_parameters():
            if name.endswith(_RESIDUAL):
                nn.init.normal_(parameter, std=std / math.sqrt(2 * self.config.num_layers))
            elif parameter.ndim > 1:
                nn.init.normal_(parameter, std=std)

    def forward(
        self,
        input_ids: Tensor,
        counted: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of the next token at every position, and the router losses.

        Args:
            input_ids: [B, T], int64, 0 .. V - 1.
            counted: [B, T], bool: tokens that count in the routers' losses; None: all.
            position_ids: [B or 1, T], int64; None: 0 .. T - 1.
            cu_seqlens: [B, K], int64: boundaries of packed documents; see `GPT.forward`.

        Returns:
            Logits [B, T, V], and balance loss and z-loss, each the mean over the layers, [2].
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)[None]
        rotary = self.rotary(position_ids)
        hidden = self.drop(self.embed(input_ids))
        documents = None if cu_seqlens is None else cu_seqlens.tolist()
        losses = []
        for block in self.blocks:
            noise = self._noise(input_ids)
            hidden, block_losses = block(hidden, rotary, noise, counted, documents)
            losses.append(block_losses)
        logits = head_logits(self.head, self.norm(hidden), chunked=self.config.chunked_loss)
        return logits, torch.stack(losses).mean(0)

    def _noise(self, input_ids: Tensor) -> Tensor | None:
        """Return the noise of one router [B, T, E], or None if its routing is not noisy."""
        # Drawn outside the blocks: under sequence parallelism a block sees only a part of the
        # tokens, while here all tensor-parallel ranks draw the same numbers.
        if self.config.routing != "noisy_top_k" or not self.training:
            return None
        dtype = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        size = (*input_ids.shape, self.config.num_experts)
        return torch.randn(size, device=input_ids.device, dtype=dtype)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the unsharded model, whatever part of it this rank holds."""
        return self.config.num_parameters

    def flops_per_token(self, length: int) -> int:
        """Return the FLOPs of training per token, with k experts; see `GPTConfig.flops_per_token`.

        Args:
            length: T.
        """
        return self.config.flops_per_token(length)

    def parallel_plan(self) -> ParallelPlan:
        """Return the parallel plan: blocks, tensor styles, experts, tied weights and batch spec."""
        tensor: dict[str, TensorStyle] = {
            "embed": "vocab_embedding",
            "blocks.*.attention_norm": "sequence_parallel",
            "blocks.*.attention": "gather_sequence",
            "blocks.*.attention.query": "colwise",
            "blocks.*.attention.key": "colwise",
            "blocks.*.attention.value": "colwise",
            "blocks.*.attention.out": "rowwise",
            "blocks.*.moe_norm": "sequence_parallel",
            # The gate runs on a shard of the tokens, but capacity is counted over whole sequences.
            "blocks.*.moe.router.gate": "sequence_gather_output",
            "blocks.*.moe.experts": "experts",
            "blocks.*.moe.experts.gate": "expert_colwise",
            "blocks.*.moe.experts.up": "expert_colwise",
            "blocks.*.moe.experts.down": "expert_rowwise",
            "norm": "sequence_parallel",
            "head": "vocab_head",
        }
        if self.config.routing == "noisy_top_k":
            tensor["blocks.*.moe.router.noise"] = "sequence_gather_output"
        if self.config.num_shared_experts:
            tensor["blocks.*.moe.shared"] = "gather_sequence"
            tensor["blocks.*.moe.shared.gate"] = "colwise"
            tensor["blocks.*.moe.shared.up"] = "colwise"
            tensor["blocks.*.moe.shared.down"] = "rowwise"
        return ParallelPlan(
            blocks="blocks",
            tied=(("embed.weight", "head.weight"),) if self.config.tied_head else (),
            tensor=tensor,
            divided={"blocks.*.attention": ("num_heads", "num_kv_heads")},
            batch=BatchLayout(
                # Each micro-batch balances its own tokens, as in the field.
                local_statistics=self.config.balance == "auxiliary",
                sequence_dims={"input_ids": 1, "labels": 1, "position_ids": 1},
                optional=("position_ids",),
                labels="labels",
                ignore_index=-100,
            ),
            # Other routings look at the whole sequence, which none of the ranks would have.
            positions={"": "position_ids"} if self.config.routing == "top_k" else None,
            experts=("blocks.*.moe.experts",),
            replica_sums=("blocks.*.moe.router.over_replicas",),
            checkpointable=("blocks.*.attention",),
        )


# Pattern of a name in transformers -> name here; the first match counts.
_HUGGING_FACE = (
    (r"model\.embed_tokens\.", "embed."),
    (r"model\.norm\.", "norm."),
    (r"lm_head\.", "head."),
    (r"model\.layers\.(\d+)\.input_layernorm\.", r"blocks.\1.attention_norm."),
    (r"model\.layers\.(\d+)\.post_attention_layernorm\.", r"blocks.\1.moe_norm."),
    (r"model\.layers\.(\d+)\.self_attn\.q_proj\.", r"blocks.\1.attention.query."),
    (r"model\.layers\.(\d+)\.self_attn\.k_proj\.", r"blocks.\1.attention.key."),
    (r"model\.layers\.(\d+)\.self_attn\.v_proj\.", r"blocks.\1.attention.value."),
    (r"model\.layers\.(\d+)\.self_attn\.o_proj\.", r"blocks.\1.attention.out."),
    (r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.gate\.", r"blocks.\1.moe.router.gate."),
    (
        r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.down_proj$",
        r"blocks.\1.moe.experts.down.weight",
    ),
)
# transformers 5 stacks the experts and fuses gate and up; the released checkpoints do neither.
_FUSED = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.gate_up_proj$")
_SINGLE = re.compile(
    r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(w[123])\.weight$"
)
_SINGLE_NAMES = {"w1": "gate", "w2": "down", "w3": "up"}


def from_hugging_face_mixtral(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of a `Mixtral` from that of a `MixtralForCausalLM` of the same sizes.

    Args:
        state: `state_dict()` of transformers 5 (experts stacked), or of the released checkpoints
            (``experts.3.w1.weight``).
    """
    renamed: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, value in state.items():
        fused, single = _FUSED.match(name), _SINGLE.match(name)
        if fused:
            gate, up = value.chunk(2, dim=1)
            renamed[f"blocks.{fused[1]}.moe.experts.gate.weight"] = gate
            renamed[f"blocks.{fused[1]}.moe.experts.up.weight"] = up
        elif single:
            place = f"blocks.{single[1]}.moe.experts.{_SINGLE_NAMES[single[3]]}.weight"
            stacks.setdefault(place, {})[int(single[2])] = value
        for pattern, place in _HUGGING_FACE:
            new, hits = re.subn("^" + pattern, place, name)
            if hits:
                renamed[new] = value
                break
    # The experts of a layer may come in any order, and from several files.
    for place, experts in stacks.items():
        renamed[place] = torch.stack([experts[i] for i in sorted(experts)])
    return renamed
