"""The `ParallelPlan` of a Hugging Face model, derived from the model itself.

The blocks are found by structure; the styles come from the model's own tensor-parallel plan, or
from `lightning_par.huggingface.styles` where that is missing. Whatever is not understood is
refused when the axis is asked for: a style that is passed over gives wrong gradients in silence.
"""

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from lightning_par.engine.experts.router_balance import balances_routers
from lightning_par.huggingface.gathered_styles import gathered_styles, vocabulary_styles
from lightning_par.huggingface.lookup import find_model
from lightning_par.huggingface.mixers import mixers_in
from lightning_par.huggingface.positions import counting_modules, POSITIONS, takes_positions
from lightning_par.huggingface.stages import find_stages
from lightning_par.huggingface.styles import InBlockStyles, plan_of_blocks
from lightning_par.plan.parallel_plan import (
    BatchLayout,
    match_pattern,
    ParallelPlan,
    TensorStyle,
)

__all__ = ["derive_plan", "find_huggingface_plan"]

_OPTIONAL = ("attention_mask", POSITIONS, "token_type_ids")
_SHIFTED = "shift_labels"
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CURE = (
    "Use data_parallel_size=1 and, under a pipeline, num_microbatches=1 (accumulate_grad_batches "
    "is still possible: it works as in a run on one process)."
)
_PASTE = (
    "Or declare a plan yourself: give your LightningModule a method\n    def "
    "parallel_plan(self):\n        plan = "
    "lightning_par.huggingface.derive_plan(self.model)\n        return dataclasses.replace(plan, "
    "{}refusals={{}}).under('model')\n"
)


def find_huggingface_plan(module: nn.Module) -> ParallelPlan | None:
    """Return the plan of the Hugging Face model inside `module`, with FQNs as seen from `module`.

    Args:
        module: A LightningModule or any other module; parameters may be on meta. Parameters of its
            own, beside the model, are whole on every tensor-parallel rank.

    Returns:
        The plan; None if there is no such model, or several beside each other.
    """
    found = find_model(module)
    if found is None:
        return None
    prefix, model = found
    plan = derive_plan(model).under(prefix)
    # Only where something is sharded do the others need to be named: a tensor axis leaves no
    # module with parameters unmentioned.
    if not prefix or not plan.tensor:
        return plan
    beside = {
        name: "replicated" for name in _owners(module) if name and not name.startswith(prefix + ".")
    }
    return _with(plan, tensor={**plan.tensor, **beside})


def derive_plan(model: Any) -> ParallelPlan:
    """Return the plan of one Hugging Face model, with FQNs as seen from it.

    Args:
        model: A `transformers.PreTrainedModel`; parameters may be on meta.
    """
    # Found once: every other field is about these blocks.
    stages = find_stages(model)
    blocks = stages.blocks
    plan = ParallelPlan(
        blocks=blocks,
        first=stages.first,
        last=stages.last,
        replicated=stages.replicated,
        kept=stages.kept,
        batch=_batch_layout(model),
        positions=_positions(model),
        captured=_captured(model, [model.get_submodule(c) for c in stages.containers]),
        experts=_experts(model),
        replica_sums=("",) if _adds_router_loss(model) and balances_routers(model) else (),
    )
    refusals = {}
    undivided = _why_not_divided(model, len(stages.containers))
    if undivided is not None:
        refusals["context"] = undivided
    # Refusals are texts kept in the plan, raised when an axis is asked for.
    whole = _why_whole_batch(model)
    if whole is not None:
        refusals["batch"] = whole + " " + _PASTE.format("")
    elif plan.replica_sums:
        refusals["microbatches"] = (
            f"{type(model).__name__} adds an auxiliary loss of its routers, a product of means "
            "over all tokens of a batch, but a stage computes one micro-batch after another. Use "
            "num_microbatches=1, or set output_router_logits=False in the configuration of the "
            "model."
        )
    name = type(model).__name__
    if _has_liger_loss(model):
        refusals["tensor"] = (
            f"{name} computes its loss by a kernel of Liger that reads the whole weight of the "
            "head, but each rank holds only a part of this weight. Call "
            "apply_liger_kernel_to_...(fused_linear_cross_entropy=False), which keeps the norms, "
            "MLPs and rotary embeddings of Liger. The loss is then computed from sharded logits."
        )
    if blocks is None:
        refusals["pipeline"] = (
            f"{name} has no list of blocks, so it cannot be cut into pipeline stages. "
            + _PASTE.format("blocks='...', ")
        )
    plan = _with(plan, refusals=refusals)
    return _with_styles(plan, model, blocks)


def _with_styles(plan: ParallelPlan, model: Any, blocks: Any) -> ParallelPlan:
    """Return a plan with the tensor styles of a model."""
    given = plan_of_blocks(model, blocks) if isinstance(blocks, str) else {}
    if not given:
        return _with(plan, tensor=gathered_styles(model), sequence_region="none")
    styles = InBlockStyles(model, blocks, given)
    tensor = {**_edge_styles(model, f"{blocks}."), **styles.tensor}
    if styles.unknown:
        # One module that is not understood makes the pairs of colwise and rowwise around it
        # unsafe: in this part of a block, the output of every layer is gathered instead.
        gathered = gathered_styles(model)
        tensor |= {
            name: style
            for name, style in gathered.items()
            if not name.startswith(f"{blocks}.") or styles.is_unknown(name)
        }
    return _with(
        plan,
        tensor=tensor,
        divided=styles.divided,
        counts=styles.counts,
        sequence_region="none" if styles.unknown else "blocks",
    )


def _has_liger_loss(model: Any) -> bool:
    """Whether Liger has replaced the forward of a model, or torch's cross-entropy, by its own."""
    functions = model.forward, nn.functional.cross_entropy
    return any(function.__module__.startswith("liger_kernel.") for function in functions)


def _with(plan: ParallelPlan, **changes: Any) -> ParallelPlan:
    values = {name: getattr(plan, name) for name in plan.__dataclass_fields__}
    return ParallelPlan(**{**values, **changes})


def _batch_layout(model: Any) -> BatchLayout:
    """Say what the model's own loss averages over.

    The causal loss shifts the labels itself, so that the first label of a row is never a target.
    """
    name = type(model).__name__
    ids = {"input_ids": 1, **dict.fromkeys(_OPTIONAL, 1)}
    if getattr(model, "main_input_name", "input_ids") != "input_ids":
        ids = {}  # an image or a sound, which is no sequence of tokens yet
    # A model without a loss of its own: the user's step has one.
    # transformers has one loss for a decoder, and for a decoder behind an encoder of images.
    is_causal = model.loss_type in ("ForCausalLM", "ForConditionalGeneration")
    is_causal |= name.endswith("LMHeadModel")
    # As transformers does for a model whose class names no loss, but computes one.
    is_causal |= model.loss_type is None and "loss_function" in _names_in_forward(model)
    if model.loss_type is None and not is_causal:
        return BatchLayout(sequence_dims=ids, optional=_OPTIONAL if ids else ())
    if model.loss_type in ("ForMaskedLM", "ForTokenClassification"):
        return BatchLayout(sequence_dims={**ids, "labels": 1}, labels="labels", optional=_OPTIONAL)
    # The source and the target are sequences of different lengths; only the labels are averaged.
    if model.config.is_encoder_decoder:
        return BatchLayout(sequence_dims={"labels": 1}, labels="labels")
    if is_causal and not _shifts(model):
        return BatchLayout(sequence_dims={**ids, "labels": 1}, labels="labels", optional=_OPTIONAL)
    if is_causal:
        return BatchLayout(
            sequence_dims={**ids, "labels": 1, _SHIFTED: 1},
            labels="labels",
            label_shift=1,
            shifted=_SHIFTED,
            optional=(*_OPTIONAL, _SHIFTED),
        )
    # One label for a sample.
    return BatchLayout(sequence_dims=ids, optional=_OPTIONAL if ids else ())


def _shifts(model: Any) -> bool:
    """Tell whether a causal model moves the labels itself; some take them moved already."""
    # Nothing in the configuration says it, and a docstring may say that it does not.
    return any("loss_function" in name or "shift" in name for name in _names_in_forward(model))


def _names_in_forward(model: Any) -> set[str]:
    """Return the names of attributes and variables in the forward of a model."""
    code = inspect.unwrap(type(model).forward).__code__
    return {*code.co_names, *code.co_varnames}


def _experts(model: Any) -> tuple[str, ...]:
    """Give the FQN patterns of the modules whose experts transformers can divide."""
    names = [name for name, _ in model.named_modules()]
    return tuple(
        pattern
        for pattern, style in (getattr(model, "ep_plan", None) or {}).items()
        # A plan is one of a family, of which some models are dense.
        if style == "ep_dispatch_experts" and any(match_pattern(pattern, name) for name in names)
    )


def _adds_router_loss(model: Any) -> bool:
    configs = [model.config]
    with suppress(ValueError):  # several text configurations, of encoder and decoder
        configs.append(model.config.get_text_config())
    return any(getattr(config, "output_router_logits", False) for config in configs)


def _positions(model: Any) -> dict[str, str] | None:
    """Say which modules are given positions; None: nothing is known of how tokens are counted."""
    if counting := counting_modules(model):
        return dict.fromkeys(counting, POSITIONS)
    if takes_positions(model):
        return {"": POSITIONS}
    # A recurrence over whole sequences needs none; what counts in spite of that is found later.
    return {} if any(mixers_in(model)) else None


def _why_not_divided(model: Any, stacks: int) -> str | None:
    """Say why the sequences of a model cannot be divided, or None.

    Args:
        model: A `transformers.PreTrainedModel`.
        stacks: How many lists of blocks it has.
    """
    name, config = type(model).__name__, model.config
    if stacks > 1:
        return (
            f"{name} has cross-attention between two lists of blocks with different tokens, which "
            "context parallelism does not support. Use context_parallel_size=1."
        )
    if _adds_router_loss(model):
        return (
            f"{name} adds an auxiliary loss of its routers, a product of means over all tokens, "
            "but no rank has all tokens. Set output_router_logits=False in the configuration of "
            "the model."
        )
    if _positions(model) is None:
        return (
            f"{name} takes no position_ids, and counts its tokens in a way that is not known, as "
            "ALiBi does; every rank would count from 0. Use context_parallel_size=1."
        )
    if any(module.rpartition(".")[2] == "indexer" for module, _ in model.named_modules()):
        return (
            f"{name} chooses for every token the tokens that it attends to (by an indexer), but no "
            "rank has all tokens. Use context_parallel_size=1."
        )
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        return (
            f"{name} limits attention to chunks of {config.attention_chunk_size} tokens by its "
            "own mask, which context parallelism does not apply. If no sequence is longer than "
            "that, set layer_types to 'full_attention' for all layers in the configuration of the "
            "model."
        )
    window = getattr(config, "sliding_window", None)
    is_used = window is not None and getattr(config, "use_sliding_window", True)
    if is_used and not _gives_window(model):
        return (
            f"{name} limits attention to sliding_window={window} tokens by its own mask, which "
            "context parallelism does not apply. If no sequence is longer than that, set "
            "sliding_window=None in the configuration of the model."
        )
    return None


def _gives_window(model: Any) -> bool:
    """Tell whether the attention of a model is told its window, not only the mask."""
    # The attention modules of a model are in the file of the model.
    sources = {inspect.getmodule(type(module)) for module in model.modules()}
    return any(
        "sliding_window=" in call
        for source in sources
        if source is not None and source.__name__.startswith("transformers.")
        for call in re.findall(r"attention_interface\((.*?)\n +\)", inspect.getsource(source), re.S)
    )


def _captured(model: Any, containers: Sequence[nn.Module]) -> dict[str, int]:
    """Find the modules inside the blocks whose outputs the model collects by hooks for its loss.

    Hidden states and attention weights are collected on request only, and not for the loss.
    """
    found: dict[str, int] = {}
    for part in model.modules():
        recorded: Mapping[str, Any] = getattr(part, "can_record_outputs", {})
        for key, entries in recorded.items():
            if "hidden_states" in key or "attentions" in key:
                continue
            for entry in entries if isinstance(entries, list) else [entries]:
                # `OutputRecorder` of transformers, or the class itself.
                kind: Any = getattr(entry, "target_class", entry)
                index = getattr(entry, "index", 1)
                for block in (block for blocks in containers for block in blocks.children()):
                    # Names within a block; empty would be the block, whose output goes on anyway.
                    names = (n for n, m in block.named_modules() if n and isinstance(m, kind))
                    found |= dict.fromkeys(names, index)
    return found


def _edge_styles(model: Any, blocks: str) -> dict[str, TensorStyle]:
    """Give the styles of what stands outside the blocks: vocabularies sharded, the rest whole."""
    styles: dict[str, TensorStyle] = {
        name: "replicated" for name in _owners(model) if not name.startswith(blocks)
    }
    return {**styles, **vocabulary_styles(model)}


def _owners(model: nn.Module) -> Iterator[str]:
    """Give the FQN of every module that has parameters of its own."""
    for name, module in model.named_modules():
        if next(module.parameters(recurse=False), None) is not None:
            yield name


def _why_whole_batch(model: Any) -> str | None:
    """Say why a batch cannot be divided among replicas or micro-batches without changing the loss.

    Args:
        model: A `transformers.PreTrainedModel`; parameters may be on meta.

    Returns:
        The reason and the cure; None if it can be divided.
    """
    # Each of these is the loss of a whole batch: the mean over parts is another number.
    name, config = type(model).__name__, model.config
    if _adds_router_loss(model) and not balances_routers(model):
        return (
            f"{name} adds an auxiliary loss of its routers, a product of means over all tokens of "
            "a batch, which cannot be computed from parts of the batch. Set "
            f"output_router_logits=False in the configuration of the model. {_CURE}"
        )
    # CLIP and its kind: a contrastive loss.
    if isinstance(getattr(model, "logit_scale", None), nn.Parameter) and hasattr(
        config, "vision_config"
    ):
        return (
            f"{name} compares every sample of a batch with every other, so its loss cannot be "
            f"computed from parts of the batch. {_CURE}"
        )
    sums = getattr(config, "ctc_loss_reduction", None) == "sum"
    if sums and type(model).__name__.endswith("CTC"):
        return (
            f"{name} returns the sum of the losses of the samples, not their mean. Set "
            f"ctc_loss_reduction='mean' in the configuration of the model. {_CURE}"
        )
    normalized = [n for n, m in model.named_modules() if isinstance(m, _NORMS)]
    if normalized:
        return (
            f"{name} normalizes with statistics over the batch ({normalized[0]} is a BatchNorm), "
            f"so a part of the batch gives a different result. {_CURE}"
        )
    return None
