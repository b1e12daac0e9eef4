"""Positions of divided sequences in models of transformers that count their tokens themselves.

Most models take ``position_ids``. Some make them of the tokens, where padding is not counted
(RoBERTa); others count in an embedding, and take none (BART). On divided sequences, each rank would
count its own tokens only.

Shapes: B batch, T tokens, t tokens of one rank.
"""

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn, Tensor

from lightning_par.engine.context.sequence_shard import SequenceShard
from lightning_par.engine.wrapping import Forward, wrap_forward

__all__ = ["POSITIONS", "count_whole_sequences", "counting_modules", "takes_positions"]

POSITIONS = "position_ids"
_RULE = "create_position_ids_from_input_ids"


def takes_positions(module: nn.Module) -> bool:
    """Tell whether the forward of a module takes positions."""
    return POSITIONS in inspect.signature(module.forward).parameters


def counting_modules(model: Any) -> dict[str, nn.Module]:
    """Return FQN -> module for those whose positions follow from the tokens of a whole sequence.

    Args:
        model: A `transformers.PreTrainedModel`.
    """
    taking = {name: m for name, m in model.named_modules() if name and takes_positions(m)}
    by_rule = {name: module for name, module in taking.items() if _rule_of(module) is not None}
    if by_rule or takes_positions(model):
        return by_rule
    return {name: module for name, module in taking.items() if isinstance(module, nn.Embedding)}


def count_whole_sequences(model: Any, axis: SequenceShard) -> None:
    """Let the counting modules of a model count the tokens of all ranks.

    Args:
        model: A `transformers.PreTrainedModel`; changed in place.
        axis: The sequence shard of this rank.
    """
    for module in counting_modules(model).values():
        wrap_forward(module, partial(_counting, module, axis), "whole_positions")


def _rule_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """Return the function (ids [B, T], index of padding) -> positions [B, T] that a module uses."""
    forward = getattr(type(module).forward, "__code__", None)
    if forward is None or _RULE not in forward.co_names or not hasattr(module, "padding_idx"):
        return None
    # A method of the module, or a function of its file.
    found: Callable[..., Tensor] | None = getattr(module, _RULE, None)
    return found or vars(sys.modules[type(module).__module__])[_RULE]


def _counting(module: nn.Module, axis: SequenceShard, inner: Forward) -> Forward:
    signature, rule = inspect.signature(inner), _rule_of(module)
    start: Any = getattr(module, "padding_idx", None)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if axis.positions is None:
            return inner(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        given, ids = (bound.arguments.get(name) for name in (POSITIONS, "input_ids"))
        if rule is None:  # these embeddings take [t], and nobody but the model counts
            bound.arguments[POSITIONS] = axis.positions[0]
        elif given is None or given is axis.positions:  # the caller left them out
            bound.arguments[POSITIONS] = (
                axis.positions + start + 1
                if ids is None
                else axis.shard_tensor(rule(axis.gather_tensor(ids, 1), start), 1, start)
            )
        return inner(*bound.args, **bound.kwargs)

    return forward
