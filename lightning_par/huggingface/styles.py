"""Tensor-parallel styles of the modules inside the blocks of a Hugging Face model."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lightning_par.plan.parallel_plan import match_pattern, TensorStyle
from lightning_par.plan.tensor_styles import TENSOR_STYLES

__all__ = ["InBlockStyles", "plan_of_blocks"]

_OURS: dict[str, TensorStyle] = {
    "colwise": "colwise",
    "colwise_transposed": "colwise_transposed",
    "fused_qkv_transposed": "fused_qkv_transposed",
    "local_params": "gather_sequence_heads",
    "mla_kv_a_proj": "replicated_with_grad_allreduce",
    "moe_tp_experts": "expert_shards",
    "replicated_with_grad_allreduce": "replicated_with_grad_allreduce",
    "rowwise": "rowwise",
    "rowwise_transposed": "rowwise_transposed",
}
_COLUMNS = ("colwise", "colwise_transposed", "fused_qkv_transposed")
_ADAPTERS: dict[str, tuple[TensorStyle, TensorStyle]] = {
    "colwise": ("replicated_with_grad_allreduce", "colwise"),
    "rowwise": ("rowwise", "sequence_parallel"),
}
"""Style of a layer -> styles of the first and the second low-rank factor beside it."""
_BERT = {
    "*.attention.self.query": "colwise",
    "*.attention.self.key": "colwise",
    "*.attention.self.value": "colwise",
    "*.attention.output.dense": "rowwise",
    "*.intermediate.dense": "colwise",
    "*.output.dense": "rowwise",
}

_FAMILY_PLANS: Mapping[str, Mapping[str, str]] = {
    "bert": _BERT,
    "electra": _BERT,
    "gpt2": {
        "*.attn.c_attn": "fused_qkv_transposed",
        "*.attn.c_proj": "rowwise_transposed",
        "*.mlp.c_fc": "colwise_transposed",
        "*.mlp.c_proj": "rowwise_transposed",
    },
    "roberta": _BERT,
}
"""`config.model_type` -> pattern -> style."""
_TWO_PARTS = ("intermediate", "output")
_LATENT = re.compile("(q|kv)_a_(proj|layernorm)(_with_mqa)?")
"""Names of what makes the latents of queries, keys and values, which the heads of a rank use."""


def plan_of_blocks(model: Any, blocks: str) -> Mapping[str, str]:
    """Return FQN pattern -> style of transformers, as the model or its family has it; empty: none.

    Args:
        model: A `transformers.PreTrainedModel`.
        blocks: FQN of its list of blocks.
    """
    own = getattr(model, "tp_plan", None) or {}
    # Only of the blocks: what a plan says of the vocabulary is decided by `vocabulary_styles`.
    given = {name: style for name, style in own.items() if name.startswith(f"{blocks}.")}
    family = _FAMILY_PLANS.get(model.config.model_type, {})
    return given or {f"{blocks}.{name}": style for name, style in family.items()}


class InBlockStyles:
    """Reads the styles off the model's own plan and fills in what that leaves out.

    Args:
        model: A `transformers.PreTrainedModel`; parameters may be on meta.
        blocks: FQN of its list of blocks.
        given: What `plan_of_blocks` returns of them.

    Attributes:
        tensor: FQN pattern -> style, for every module inside the blocks that needs one.
        divided: FQN pattern -> attributes to lower to the local count.
        counts: FQN pattern -> numbers of heads and experts, which the degree has to divide.
        unknown: FQN patterns of the parts of a block, such as its attention, that hold a module for
            which no style is known. The fields above say nothing of what is inside of them.
    """

    def __init__(self, model: Any, blocks: str, given: Mapping[str, str]) -> None:
        self.tensor: dict[str, TensorStyle] = {}
        self.divided: dict[str, tuple[str, ...]] = {}
        self.counts: dict[str, dict[str, int]] = {}
        self.unknown: set[str] = set()
        self._config, self._given = model.config, given
        modules = _named_modules(model, blocks)
        self._containers(modules)
        self._owners(modules, len(blocks.split(".")) + 2)
        for part in [*self.unknown]:  # the MLP of a BERT, which is two parts of a block
            block, _, name = part.rpartition(".")
            if name in _TWO_PARTS:
                self.unknown |= {f"{block}.{other}" for other in _TWO_PARTS}
        for known in (self.tensor, self.divided, self.counts):
            for fqn in [name for name in known if self.is_unknown(name)]:
                del known[fqn]

    def _style_of(self, fqn: str) -> str | None:
        return next((s for p, s in self._given.items() if match_pattern(p, fqn)), None)

    def _containers(self, modules: dict[str, nn.Module]) -> None:
        """Give a style to what surrounds sharded layers: it takes the whole sequence."""
        for fqn, module in modules.items():
            # The module that holds sharded layers is where the sequence is gathered.
            style, (parent, _, name) = self._style_of(fqn), fqn.rpartition(".")
            if style in _COLUMNS:
                self.tensor[parent] = "gather_sequence"
                if name in ("c_attn", "k_proj", "key", "query_key_value"):
                    self.counts[parent] = dict(self._heads())
                # GPT-2's attention splits q, k, v by its own `split_size`, which has to be that
                # of a rank.
                if style == "fused_qkv_transposed":
                    self.divided[parent] = ("num_heads", "split_size")
                # transformers' Conv1D reshapes its output to `nf` features.
                if isinstance(getattr(module, "nf", None), int):
                    self.divided[fqn] = ("nf",)
            elif style == "moe_tp_experts":
                self.tensor[parent] = "whole_inside"
                self.divided[fqn] = ("num_experts",)

    def _heads(self) -> Iterator[tuple[str, int]]:
        for name in ("num_attention_heads", "num_key_value_heads"):
            number = getattr(self._config, name, None)
            if isinstance(number, int):
                yield name, number

    def _owners(self, modules: dict[str, nn.Module], depth: int) -> None:
        """Give a style to every module with parameters of its own.

        Args:
            modules: FQN pattern -> module.
            depth: Number of components in the name of a part of a block.
        """
        for fqn, module in modules.items():
            if next(module.parameters(recurse=False), None) is None:
                continue
            style = self._owner_style(fqn, module)
            if style is None:
                self.unknown.add(".".join(fqn.split(".")[:depth]))
            else:
                self.tensor[fqn] = style

    def is_unknown(self, fqn: str) -> bool:
        """Tell whether a module is inside of an `unknown` part.

        Args:
            fqn: Its name, or its pattern.
        """
        names = fqn.split(".")
        return any(
            match_pattern(part, ".".join(names[: part.count(".") + 1])) for part in self.unknown
        )

    def _owner_style(self, fqn: str, module: nn.Module) -> TensorStyle | None:
        given = self._style_of(fqn)
        if given is not None:
            is_known = True
            if given == "moe_tp_experts":
                # Tokens, indices of their experts, and weights of these.
                takes = len(inspect.signature(module.forward).parameters)
                is_known = takes == 3 and isinstance(getattr(module, "num_experts", None), int)
            elif given == "local_params":
                own = {self._style_of(f"{fqn}.{name}") for name in _own_names(module)}
                is_known = own <= {"colwise"}
            return _OURS.get(given) if is_known else None
        # Before the rules for the rest: a factor is inside of what is gathered.
        adapted = self._adapter_style(fqn)
        if adapted is not None:
            return adapted
        # Styles of what it is in: containers are done first.
        around = {s for p, s in self.tensor.items() if fqn.startswith(p + ".")}
        # A router, beside experts that see the whole sequence.
        holds_shards = any(TENSOR_STYLES[s].inside == "shards" for s in around)
        if "whole_inside" in around and not holds_shards:
            return "replicated"
        # Such as a bias of the router: what surrounds the experts computes alike on every rank.
        if self.tensor.get(fqn) == "whole_inside":
            return "whole_inside"
        # A norm between blocks' parts sees only its tokens of the sequence.
        if "norm" in type(module).__name__.lower() and not around:
            return "sequence_parallel"
        return self._latent_style(fqn)

    def _latent_style(self, fqn: str) -> TensorStyle | None:
        """Give the style of a module that the plan leaves out beside a latent of keys and values.

        Each rank uses latents for its heads, and so has a part of their gradients. The indexer that
        chooses tokens runs alike on every rank, without gradients.
        """
        around, _, name = fqn.rpartition(".")
        if name == "indexer" or around.endswith(".indexer"):
            return "replicated" if self._has_latent(fqn.rpartition(".indexer")[0]) else None
        is_latent = _LATENT.fullmatch(name) and self._has_latent(around)
        return "replicated_with_grad_allreduce" if is_latent else None

    def _has_latent(self, attention: str) -> bool:
        return any(
            style == "mla_kv_a_proj" and match_pattern(pattern.rpartition(".")[0], attention)
            for pattern, style in self._given.items()
        )

    def _adapter_style(self, fqn: str) -> TensorStyle | None:
        """Give the style of a part of a low-rank adapter, which wraps a layer as `base_layer`."""
        parts = fqn.split(".")
        for place, part in enumerate(parts):
            # The plan names the layer that was there before the adapter wrapped it.
            style = self._style_of(".".join(parts[:place]))
            if part == "base_layer" and style in _OURS:
                return _OURS[style]
            if part in ("lora_A", "lora_B") and style in _ADAPTERS:
                return _ADAPTERS[style][part == "lora_B"]
        return None


def _named_modules(model: nn.Module, blocks: str) -> dict[str, nn.Module]:
    """Give the modules inside the blocks: one pattern for all blocks if these are alike, else every
    name, since some may have adapters, or experts, and others not.
    """
    container = model.get_submodule(blocks)
    kinds = {
        # Alike by names, classes and parameters, at any depth.
        tuple((name, type(module), *_own_names(module)) for name, module in block.named_modules())
        for block in container.children()
    }
    named = {f"{blocks}.{name}": module for name, module in container.named_modules() if name}
    return named if len(kinds) > 1 else {_pattern(name): m for name, m in named.items()}


def _own_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters(recurse=False)]


def _pattern(fqn: str) -> str:
    return re.sub(r"\b\d+\b", "*", fqn)
