"""The table of tensor styles: all that a style means, in one row.

A tensor style says how a module takes part in tensor parallelism over the ranks of the ``tp`` axis.
Weights are [out, in], activations [B, T, D].

To add a tensor style:

1. Add its name to `TensorStyle` and its row to `TENSOR_STYLES`, both sorted. The resolved plan, the
   placement of parameters, the sums of gradients and the forecasts read it.
2. Where the module has to compute something else than its own forward on the local shards, add one
   function, and an entry of the style's name, to
   `lightning_par.engine.tensor.styles.STYLE_FUNCTIONS`.

A shard is one contiguous block of one dim. Two strips of it, as a fused gate and up would need,
either leave the weight whole (as `fused_qkv_transposed` does) or want a weight [2, F, in].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

__all__ = ["TENSOR_STYLES", "StyleSpec", "TensorStyle"]

TensorStyle = Literal[
    "colwise",
    "colwise_alone",
    "colwise_gather_output",
    "colwise_transposed",
    "expert_colwise",
    "expert_rowwise",
    "expert_shards",
    "experts",
    "fused_qkv_transposed",
    "gather_sequence",
    "gather_sequence_heads",
    "replicated",
    "replicated_inside",
    "replicated_with_grad_allreduce",
    "rowwise",
    "rowwise_transposed",
    "sequence_gather_output",
    "sequence_parallel",
    "split_sequence",
    "vocab_embedding",
    "vocab_head",
    "whole_inside",
    "whole_sequence",
]
"""The name of a row of `TENSOR_STYLES`, which says what it means."""


@dataclass(frozen=True, kw_only=True)
class StyleSpec:
    """What a tensor style means.

    Attributes:
        meaning: What is sharded and what a call of the module does, for the reader.
        weight_dim: Sharded dim of the parameter named ``weight``; None: it is whole.
        bias_dim: Sharded dim of every other parameter of the module; None: they are whole.
        weight_ndim: Number of dims that ``weight`` must have; it must exist, and the degree must
            divide `weight_dim`. None: the module may hold any parameters, or none.
        uneven: The degree need not divide `weight_dim`; every rank needs one row.
        partial_gradients: When a rank computes only a part of the gradient of a whole parameter, so
            that the parts are summed over ``tp``.
        inside: What modules inside compute, on all T tokens: "shards" of the container's result,
            of which it makes the input whole and sums the gradient; the same on every rank
            ("alike"); or that with sequence parallelism of their own switched off ("whole").
        crossing: Boundary of sharded weights: the module's input enters them, or its output leaves
            them, which takes a collective.
        output: What a module gives that computes a part: its "shard", such parts "summed" or
            "gathered" over ``tp``, or vocabulary-sharded "logits" with a loss of their own.
        reason: Why a parameter stays whole, for the table of placements.
    """

    meaning: str
    weight_dim: int | None = None
    bias_dim: int | None = None
    weight_ndim: int | None = None
    uneven: bool = False
    partial_gradients: Literal["never", "sequence_parallel", "always"] = "never"
    inside: Literal["alike", "shards", "whole"] | None = None
    crossing: Literal["enter", "leave"] | None = None
    output: Literal["gathered", "logits", "shard", "summed"] | None = None
    reason: str = ""

    @property
    def needs_container(self) -> bool:
        """Whether the input has to be made whole, and its gradient be summed, by a module around
        it whose `inside` are "shards".
        """
        return self.output == "shard" and self.crossing is None

    def sharded_dim(self, name: str) -> int | None:
        """Return the dim in which a parameter is sharded, or None.

        Args:
            name: Name of the parameter in its module, such as ``weight``.
        """
        return self.weight_dim if name == "weight" else self.bias_dim


_OWN_TOKENS = "computed on each rank's tokens; gradients are summed"
_LATE_BIAS = "a rowwise layer adds its bias after the sum"

TENSOR_STYLES: Mapping[TensorStyle, StyleSpec] = {
    "colwise": StyleSpec(
        meaning="sharded over the output features; the input is whole, the output is a shard",
        weight_dim=0,
        bias_dim=0,
        weight_ndim=2,
        output="shard",
    ),
    "colwise_alone": StyleSpec(
        meaning="like colwise, outside of a 'gather_sequence' container: its own input is made "
        "whole along T",
        weight_dim=0,
        bias_dim=0,
        weight_ndim=2,
        crossing="enter",
        output="shard",
    ),
    "colwise_gather_output": StyleSpec(
        meaning="like colwise; the output is gathered",
        weight_dim=0,
        bias_dim=0,
        weight_ndim=2,
        uneven=True,
        crossing="enter",
        output="gathered",
    ),
    "colwise_transposed": StyleSpec(
        meaning="like colwise, for a weight [in, out]",
        weight_dim=1,
        bias_dim=0,
        weight_ndim=2,
        output="shard",
    ),
    "expert_colwise": StyleSpec(
        meaning="a weight [E, out, in] inside experts, sharded over the output features",
        weight_dim=1,
        bias_dim=1,
        weight_ndim=3,
    ),
    "expert_rowwise": StyleSpec(
        meaning="a weight [E, out, in] inside experts, sharded over the input features; the "
        "container sums the partial outputs, so there is no bias",
        weight_dim=2,
        bias_dim=2,
        weight_ndim=3,
    ),
    "expert_shards": StyleSpec(
        meaning="parameters [E, ...] sharded over the experts; called with the tokens, the indices "
        "of their experts (E means none) and their weights",
        weight_dim=0,
        bias_dim=0,
    ),
    "experts": StyleSpec(
        meaning="a container whose first input is made whole along T, whose second one weights its "
        "partial result, and which gives a pair, the first of which is summed",
        inside="shards",
    ),
    "fused_qkv_transposed": StyleSpec(
        meaning="a whole weight [in, 3 out] of query, key and value side by side; each rank uses "
        "the columns of its heads",
        partial_gradients="always",
        output="shard",
        reason="query, key and value are side by side; each rank uses its heads",
    ),
    "gather_sequence": StyleSpec(
        meaning="a container of colwise and rowwise modules; its first input is made whole along "
        "T; its own parameters scale or shift what a rowwise module gives",
        partial_gradients="sequence_parallel",
        crossing="enter",
        inside="shards",
        reason=_OWN_TOKENS,
    ),
    "gather_sequence_heads": StyleSpec(
        meaning="like gather_sequence; its own parameters [heads, ...] are sharded over the heads",
        weight_dim=0,
        bias_dim=0,
        crossing="enter",
        inside="shards",
    ),
    "replicated": StyleSpec(
        meaning="the same computation on every rank",
        reason="every rank computes it alike",
    ),
    "replicated_inside": StyleSpec(
        meaning="like replicated, for a module that reads parameters of modules inside it itself",
        reason="every rank computes it alike",
    ),
    "replicated_with_grad_allreduce": StyleSpec(
        meaning="whole parameters, used on sharded heads",
        partial_gradients="always",
        reason="used on each rank's heads; gradients are summed",
    ),
    "rowwise": StyleSpec(
        meaning="the weight sharded over the input features; partial outputs are summed, then the "
        "whole bias is added",
        weight_dim=1,
        weight_ndim=2,
        partial_gradients="sequence_parallel",
        crossing="leave",
        output="summed",
        reason=_LATE_BIAS,
    ),
    "rowwise_transposed": StyleSpec(
        meaning="like rowwise, for a weight [in, out]",
        weight_dim=0,
        weight_ndim=2,
        partial_gradients="sequence_parallel",
        output="summed",
        reason=_LATE_BIAS,
    ),
    "sequence_gather_output": StyleSpec(
        meaning="like sequence_parallel; the output is made whole along T",
        partial_gradients="sequence_parallel",
        reason=_OWN_TOKENS,
    ),
    "sequence_parallel": StyleSpec(
        meaning="whole parameters, computed on each rank's T/tp tokens",
        partial_gradients="sequence_parallel",
        reason=_OWN_TOKENS,
    ),
    "split_sequence": StyleSpec(
        meaning="computed whole; the output is cut along T (learned positions)",
        partial_gradients="sequence_parallel",
        reason="computed whole; the output is cut along T",
    ),
    "vocab_embedding": StyleSpec(
        meaning="an embedding table sharded over the vocabulary; partial outputs are summed",
        weight_dim=0,
        bias_dim=0,
        weight_ndim=2,
        uneven=True,
        crossing="leave",
        output="summed",
    ),
    "vocab_head": StyleSpec(
        meaning="like colwise; the logits stay sharded over the vocabulary, and so does the loss",
        weight_dim=0,
        bias_dim=0,
        weight_ndim=2,
        uneven=True,
        crossing="enter",
        output="logits",
    ),
    "whole_inside": StyleSpec(
        meaning="like whole_sequence; the first output is cut along T again",
        inside="whole",
    ),
    "whole_sequence": StyleSpec(
        meaning="a container that computes alike on every rank; its first input is made whole "
        "along T",
        inside="alike",
    ),
}
