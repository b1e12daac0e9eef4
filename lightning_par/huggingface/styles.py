"""Tensor-parallel styles of the modules inside the blocks of a Hugging Face model."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from lightning_par.plan.parallel_plan import match_pattern, TensorStyle

__all__ = ["InBlockStyles"]

_OURS: dict[str, TensorStyle] = {
    "colwise": "colwise",
    "colwise_transposed": "colwise_transposed",
    "fused_qkv_transposed": "fused_qkv_transposed",
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


class InBlockStyles:
    """Reads the styles off the model's own plan and fills in what that leaves out.

    Args:
        model: A `transformers.PreTrainedModel`; parameters may be on meta.
        blocks: FQN of its list of blocks.

    Attributes:
        tensor: FQN pattern -> style, for every module inside the blocks that needs one.
        divided: FQN pattern -> attributes to lower to the local count.
        counts: FQN pattern -> numbers of heads and experts, which the degree has to divide.
        problems: What is not understood, one sentence each.
    """

    def __init__(self, model: Any, blocks: str) -> None:
        self.tensor: dict[str, TensorStyle] = {}
        self.divided: dict[str, tuple[str, ...]] = {}
        self.counts: dict[str, dict[str, int]] = {}
        self.problems: list[str] = []
        self._name, self._config = type(model).__name__, model.config
        self._given = self._plan_of(model, blocks)
        if not self._given:
            self.problems.append(
                "neither transformers nor lightning_par has a tensor-parallel plan for "
                f"{self._name} (model_type {model.config.model_type!r})."
            )
            return
        modules = _named_modules(model, blocks)
        self._containers(modules)
        self._owners(modules)

    @staticmethod
    def _plan_of(model: Any, blocks: str) -> dict[str, str]:
        own = getattr(model, "tp_plan", None) or {}
        # Only of the blocks: what a plan says of the vocabulary is decided by
        # `vocabulary_styles`.
        given = {k: v for k, v in own.items() if k.startswith(f"{blocks}.")}
        if given:
            return given
        family = _FAMILY_PLANS.get(model.config.model_type, {})
        return {f"{blocks}.{k}": v for k, v in family.items()}

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

    def _owners(self, modules: dict[str, nn.Module]) -> None:
        """Give a style to every module with parameters of its own."""
        for fqn, module in modules.items():
            if next(module.parameters(recurse=False), None) is None:
                continue
            style = self._owner_style(fqn, module)
            if style is not None:
                self.tensor[fqn] = style

    def _owner_style(self, fqn: str, module: nn.Module) -> TensorStyle | None:
        given = self._style_of(fqn)
        if given is not None:
            if given == "moe_tp_experts" and len(inspect.signature(module.forward).parameters) != 3:
                self.problems.append(
                    f"the forward of {fqn} does not have the three arguments tokens, expert "
                    "indices and expert weights."
                )
            if given not in _OURS:
                self.problems.append(
                    f"the plan of transformers gives {fqn} the style {given!r}, which "
                    "lightning_par does not support."
                )
            return _OURS.get(given)
        # Before the rules for the rest: a factor is inside of what is gathered.
        adapted = self._adapter_style(fqn)
        if adapted is not None:
            return adapted
        # Styles of what it is in: containers are done first.
        around = {s for p, s in self.tensor.items() if fqn.startswith(p + ".")}
        # A router, beside experts that see the whole sequence.
        if "whole_inside" in around and "gather_sequence" not in around:
            return "replicated"
        # A norm between blocks' parts sees only its tokens of the sequence.
        if "norm" in type(module).__name__.lower() and not around:
            return "sequence_parallel"
        self.problems.append(
            f"{fqn} ({type(module).__name__}) has parameters, but no style in the tensor-parallel "
            f"plan of {self._name}."
        )
        return None

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
        # Alike by names and classes, at any depth.
        tuple((name, type(module)) for name, module in block.named_modules())
        for block in container.children()
    }
    named = {f"{blocks}.{name}": module for name, module in container.named_modules() if name}
    return named if len(kinds) > 1 else {_pattern(name): m for name, m in named.items()}


def _pattern(fqn: str) -> str:
    return re.sub(r"\b\d+\b", "*", fqn)
