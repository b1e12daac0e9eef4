"""The loss of transformers that balances experts, over the tokens of all replicas.

Note [Router balance]: the loss is a product of two means over all tokens of a batch (the share of
tokens that an expert gets, and its mean probability), so it is no mean of the losses of parts. The
replicas sum what both means are made of, and every replica adds the same loss. The gradients of
all of them come back to each, as the weights of the replicas have the sum 1.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn, Tensor

from lightning_par.engine.collectives import apply_function, copy_to_group, reduce_to_whole
from lightning_par.engine.wrapping import Forward
from lightning_par.errors import PlanError
from lightning_par.upstream.functions import replaced

__all__ = [
    "balance_over_replicas",
    "balances_routers",
    "own_balance",
    "shared_balance",
    "without_balance",
]

_NAME = "load_balancing_loss_func"


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Tokens of all replicas count in a step; see `shared_balance`."""

    repeats: bool
    is_lost: Callable[[], bool]


_tokens: Literal["own", "none"] | _Step = "own"
"""Whose tokens count: "own" outside of steps, where replicas may call the model unequally often."""
_is_kept = False


def balances_routers(model: nn.Module) -> bool:
    """Whether a model adds the loss of transformers that balances the experts of all its layers.

    Args:
        model: Its forward finds this loss by name in its own file.
    """
    forward = inspect.unwrap(model.forward)
    code = getattr(forward, "__code__", None)
    function = getattr(_file_of(forward), _NAME, None)
    if function is None or code is None or _NAME not in code.co_names:
        return False
    # Compared by values, as each file of transformers has a function of its own.
    logits = tuple(torch.arange(float(n), n + 24).sin().view(6, 4) for n in (1, 40))
    with suppress(Exception):  # it takes or gives something else
        found = [
            (function(logits, 4, 2, mask), _balance(logits, 4, 2, mask))
            for mask in (None, torch.tensor([[1, 1, 0], [1, 0, 1]]))
        ]
        return all(torch.allclose(theirs, ours) for theirs, ours in found)
    return False


def _file_of(forward: Any) -> Any:
    return sys.modules.get(inspect.unwrap(forward).__module__)


def balance_over_replicas(module: nn.Module, group: dist.ProcessGroup, inner: Forward) -> Forward:
    """Wrap the forward of a model that `balances_routers`, see Note [Router balance].

    **Communicates**: in a step that trains or evaluates, one all-reduce of 2E + 2 numbers, and one
    in the backward.
    """
    file = _file_of(inner)

    def forward(*args: Any, **kwargs: Any) -> Any:
        # While it generates, replicas may call the model unequally often.
        generates = kwargs.get("past_key_values") is not None and kwargs.get("labels") is None
        balance = _balance if generates else partial(_balance, group=group)
        with replaced(file, _NAME, balance):
            return inner(*args, **kwargs)

    return forward


@contextmanager
def shared_balance(*, repeats: bool, is_sum: bool, is_lost: Callable[[], bool]) -> Iterator[None]:
    """Surrounds a training or evaluation step, which every replica runs.

    Args:
        repeats: Whether the batch of this replica repeats a sample of another one.
        is_sum: Whether the loss of the batch is the sum of those of the replicas.
        is_lost: Whether the loss of this replica's own batch has weight 0 and a backward, which
            gives no gradients; asked when the model computes the loss.

    Raises:
        PlanError: The loss that balances experts would have another weight than on one process.
    """
    if is_sum:
        raise PlanError(
            "LP211",
            "the model adds a loss that balances experts (output_router_logits=True), but the "
            "loss of training_step is a sum over the samples. Replicas add the balance loss once "
            "each, so a sum would count it several times. Divide the loss by the number of samples "
            "or tokens, or set output_router_logits=False in the configuration of the model, or "
            "use data_parallel_size=1.",
        )
    counted = _Step(repeats=repeats, is_lost=is_lost)
    with replaced(sys.modules[__name__], "_tokens", counted):
        yield


@contextmanager
def without_balance() -> Iterator[None]:
    """Leave the loss out, where losses of parts of a batch are compared with that of the batch."""
    with replaced(sys.modules[__name__], "_tokens", "own" if _is_kept else "none"):
        yield


@contextmanager
def own_balance() -> Iterator[None]:
    """Keep the loss of a rank's own tokens, also `without_balance`: does padding change it?"""
    with replaced(sys.modules[__name__], "_is_kept", True):
        yield


def _balance(
    gate_logits: Any,
    num_experts: Any = None,
    top_k: int = 2,
    attention_mask: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """Return E times the sum over experts of their share of tokens times their mean probability.

    Args:
        gate_logits: Of every layer, [N, E].
        num_experts: E.
        top_k: Experts of a token.
        attention_mask: [B, T], 0 where a token does not count.
        group: Ranks whose tokens count, too, in a step.
    """
    if not isinstance(gate_logits, tuple):
        return 0
    device = gate_logits[0].device
    sums = [_router_sums(logits.to(device), top_k, attention_mask) for logits in gate_logits]
    total = torch.stack(sums).sum(0)
    if group is not None and _tokens == "none":
        return total.sum() * 0
    if group is not None and isinstance(_tokens, _Step):
        total = _over_replicas(total, _tokens, group)
    shares, means = apply_function(_Means, total).chunk(2)
    return (shares.detach() * means).sum() * num_experts


class _Means(torch.autograd.Function):
    """Divides sums [n] by their last entry; one node, as this divisor is no form of the loss."""

    @staticmethod
    def forward(ctx: Any, total: Tensor) -> Tensor:
        ctx.save_for_backward(total[-1:])
        return total[:-1] / total[-1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (divisor,) = ctx.saved_tensors
        return torch.cat([grad / divisor, torch.zeros_like(divisor)])


def _over_replicas(total: Tensor, step: _Step, group: dist.ProcessGroup) -> Tensor:
    """Return the sum of the [2E + 1] numbers of all replicas."""
    is_lost = not step.repeats and total.requires_grad and step.is_lost()
    counted = torch.cat([total * 0 if step.repeats else total, total.new_tensor([float(is_lost)])])
    total = copy_to_group(reduce_to_whole(counted, group), group)
    # Every rank learns of it; for this it waits for its device, as the exchange of tokens does.
    if total.requires_grad and float(total[-1].detach()):
        raise PlanError(
            "LP211",
            "all labels in the batch of one replica have the ignored value (ignore_index), so this "
            "batch has the weight 0 in the loss. The model also adds a loss that balances experts "
            "(output_router_logits=True), and the gradient of this loss from this replica would be "
            "lost. Leave out samples without labels, or set output_router_logits=False in the "
            "configuration of the model, or use data_parallel_size=1.",
        )
    return total[:-1]


def _router_sums(logits: Tensor, top_k: int, mask: Tensor | None) -> Tensor:
    """Return the number of tokens and the sum of probabilities of every expert, and of tokens."""
    probabilities = logits.softmax(-1)
    chosen = probabilities.topk(top_k, -1).indices
    probabilities = probabilities.float()
    load = torch.zeros_like(probabilities).scatter(1, chosen, 1.0)
    counted = torch.ones_like(load[:, :1]) if mask is None else mask.reshape(-1, 1).to(load)
    return torch.cat([load * counted, probabilities * counted, counted], 1).sum(0)
