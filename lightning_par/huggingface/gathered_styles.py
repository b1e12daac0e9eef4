"""Tensor-parallel styles that fit any model: sharded linear layers whose outputs are gathered.

Where nothing says which layers belong together, every large linear layer is sharded over its output
features, and its output is made whole at once. This is right for whatever stands between the
layers, and shards weights, gradients, optimizer states and products alike; it moves more than pairs
of colwise and rowwise layers do.
"""

from collections.abc import Iterator
from typing import Any, cast

from torch import nn

from lightning_par.huggingface.use_order import uses_of
from lightning_par.plan.parallel_plan import TensorStyle
from lightning_par.plan.tensor_styles import TENSOR_STYLES

__all__ = ["gathered_styles", "vocabulary_styles"]

_OF_NO_NUMBERS = ("dtype",), ("device",), ("shape",)
_LEAST_FEATURES = 16  # fewer are not worth a collective


def gathered_styles(model: Any) -> dict[str, TensorStyle]:
    """Return FQN -> style for every module of a model that has parameters of its own.

    Args:
        model: A `transformers.PreTrainedModel`; parameters may be on meta.
    """
    styles: dict[str, TensorStyle] = {}
    for name, module in model.named_modules():
        # The empty name is the model itself, which no pattern can name.
        if name and next(module.parameters(recurse=False), None) is not None:
            # `type` and not isinstance: a subclass may compute something else with its weight.
            gathered = type(module) is nn.Linear and module.out_features >= _LEAST_FEATURES
            styles[name] = "colwise_gather_output" if gathered else "replicated"
    styles |= vocabulary_styles(model)
    read = set(_read_elsewhere(model))
    tied: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owner, _, kind = name.rpartition(".")
        # By identity: tied modules share one parameter, and it is sharded once.
        if kind == "weight" and owner in styles:
            tied.setdefault(id(parameter), set()).add(owner)
    for owners in tied.values():
        # Tied with different dims, or read by a module around it: one tensor cannot be two
        # shards, and a shard would be taken for the whole.
        if len({TENSOR_STYLES[styles[owner]].weight_dim for owner in owners}) > 1 or owners & read:
            styles |= dict.fromkeys(owners, "replicated")
    return styles


def _read_elsewhere(model: nn.Module) -> Iterator[str]:
    """Yield the FQNs of modules whose weights are used by the forward of a module around them."""
    for outer, module in model.named_modules():
        for use in uses_of(cast(Any, type(module))):
            owner: Any = module
            for depth, name in enumerate(use.chain):
                # ("lm_head", "weight"): depth 1 and more, as a module's own weight is not read
                # elsewhere.
                if name in ("weight", "bias") and depth:
                    if use.chain[depth + 1 : depth + 2] not in _OF_NO_NUMBERS:
                        yield ".".join([*([outer] if outer else []), *use.chain[:depth]])
                    break
                owner = owner._modules.get(name)
                if not isinstance(owner, nn.Module):
                    break


def vocabulary_styles(model: Any) -> dict[str, TensorStyle]:
    """Return FQN -> style of the embedding table and of the head, where they are layers of torch.

    Args:
        model: A `transformers.PreTrainedModel`; parameters may be on meta.
    """
    found: dict[str, TensorStyle] = {}
    try:
        table, head = model.get_input_embeddings(), model.get_output_embeddings()
    except NotImplementedError:  # models of images and sounds have none
        return found
    weight = table.weight if isinstance(table, nn.Embedding) else None
    # What is inside of a table, such as a norm, would get the tokens of one shard only.
    is_whole = weight is not None and len([*table.parameters()]) > 1
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight is weight and not is_whole:
            found[name] = "vocab_embedding"
        elif module is head and isinstance(head, nn.Linear):
            found[name] = "vocab_head"
    if is_whole and getattr(head, "weight", None) is weight:
        return {}  # a head is as its table
    return found
