"""Mixtures of experts: a router that sends tokens to experts, and the experts.

Shapes: B batch, T tokens, N = B T, D model dim, F feed-forward dim, E experts, k of them per token,
A assignments (a token and one of its experts).

Note [What equals one process]: a choice never depends on other sequences: capacity is counted in
every sequence by itself, and where it runs out, later tokens are dropped. The balance loss of a
layer, ``E sum_e f_e P_e``, has the share f_e of assignments to expert e, summed over the replicas
by `ReplicaSum`, and the mean probability P_e of this replica's tokens. f has no gradient and P is a
mean, so the mean of the losses over the replicas is the loss of the global batch. A pipeline has no
more than a micro-batch in hand, so f is that of the micro-batch with the same number on all
replicas; the bias needs no such limit, since it moves after a step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par.models.layers import SwiGLU
from lightning_par.models.mixtral.config import MixtralConfig
from lightning_par.models.mixtral.grouped_linear import GroupedBackend, GroupedLinear

__all__ = ["Beside", "Experts", "Mixture", "ReplicaSum", "RoutedTokens", "Router", "RouterRecord"]

Beside = Callable[[], Tensor] | None


class RoutedTokens(NamedTuple):
    """Which tokens go to which expert.

    Attributes:
        tokens: [A], int64: number of the token in [N]; sorted by expert, then by token.
        weights: [A], of the expert's output in the token's.
        counts: [E], int64: assignments of every expert; their sum is A.
        losses: [2]: the balance loss and the z-loss, in float32 or wider.
    """

    tokens: Tensor
    weights: Tensor
    counts: Tensor
    losses: Tensor


@dataclass
class RouterRecord:
    """What one router saw in training, over all replicas, until somebody resets it.

    Attributes:
        load: [E], float64: assignments that were wanted, before any was dropped.
        dropped: Of those, how many were.
        z: Sum over the tokens of the squared log-sum-exp of the logits.
        tokens: How many.
    """

    load: Tensor
    dropped: Tensor
    z: Tensor
    tokens: Tensor


class ReplicaSum(nn.Module):
    """Gives back what it gets; where there are several replicas, a strategy sums it over them."""

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the sum of `numbers`, which has no gradient."""
        return numbers


class Router(nn.Module):
    """Decides which experts see a token, and with which weights.

    ``top_k``: the k most likely, their probabilities scaled to the sum 1 (Mixtral). ``switch``: the
    most likely one, weighted by its probability, as long as it has room. ``noisy_top_k``: the k
    highest logits after noise of a learned scale, in training. ``expert_choice``: every expert
    takes the tokens of a sequence to which it is most likely; this looks at later tokens, too.

    With ``balance="bias"``, ``bias_rate * bias_steps`` is added to the probabilities for the choice
    alone.

    Args:
        config: Sizes and kinds.

    **Source**: Jiang et al. 2401.04088, equation 1; Fedus et al. 2101.03961, sections 2.1 and 2.2;
    Shazeer et al. 1701.06538, equations 3 to 5 (our balance loss replaces theirs); Zhou et al.
    2202.09368, section 3; Zoph et al. 2202.08906, equation 5 (z-loss); Wang et al. 2408.15664,
    algorithm 1 (bias).
    """

    bias_steps: Tensor

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        self.config = config
        self.gate = nn.Linear(config.model_dim, config.num_experts, bias=False)
        noisy = config.routing == "noisy_top_k"
        self.noise = nn.Linear(config.model_dim, config.num_experts, bias=False) if noisy else None
        self.over_replicas = ReplicaSum()
        steps = torch.zeros(config.num_experts, dtype=torch.int64)
        self.register_buffer("bias_steps", steps, persistent=config.balance == "bias")
        self.step_load: Tensor | None = None
        self.record: RouterRecord | None = None

    def forward(
        self, hidden: Tensor, noise: Tensor | None = None, counted: Tensor | None = None
    ) -> RoutedTokens:
        """Route every token.

        Args:
            hidden: [B, T, D].
            noise: [B, T, E], standard normal; for ``noisy_top_k`` in training.
            counted: [B, T], bool: which tokens count in the losses; None: all.
        """
        logits = _wide(self.gate(hidden))
        scores = logits
        if self.noise is not None and noise is not None:
            scores = logits + noise * F.softplus(_wide(self.noise(hidden)))
        probabilities = scores.softmax(-1)
        chosen, weights, kept = self._choose(scores, probabilities)
        mask = torch.ones_like(logits[..., 0]) if counted is None else counted.to(logits.dtype)
        losses = self._losses(logits, probabilities, chosen, mask, kept)
        if self.config.routing == "expert_choice":
            return _by_expert_choice(chosen, weights, logits.shape[1], losses)
        return _by_token_choice(chosen, weights, kept, self.config.num_experts, losses)

    def _choose(
        self, scores: Tensor, probabilities: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the choice with its weights: [B, T, k] and which are kept, or [B, E, C]."""
        config = self.config
        if config.routing == "expert_choice":
            room = config.capacity(scores.shape[1])
            weights, tokens = probabilities.transpose(1, 2).topk(room, dim=-1)
            return tokens, weights, None
        wanted = probabilities
        if config.balance == "bias":
            wanted = wanted + config.bias_rate * self.bias_steps
        chosen = wanted.topk(config.experts_per_token, dim=-1).indices
        weights = probabilities.gather(-1, chosen)
        if config.routing == "switch":
            queued = F.one_hot(chosen, config.num_experts).sum(-2).cumsum(1)
            place = queued.gather(-1, chosen) - 1
            return chosen, weights, place < config.capacity(scores.shape[1])
        return chosen, weights / weights.sum(-1, keepdim=True), None

    def _losses(
        self,
        logits: Tensor,
        probabilities: Tensor,
        chosen: Tensor,
        mask: Tensor,
        kept: Tensor | None,
    ) -> Tensor:
        z = logits.logsumexp(-1).square() * mask
        total = mask.sum().clamp(min=1)
        load = self._load(probabilities, chosen, mask, kept, z)
        if self.config.balance != "auxiliary":
            return torch.stack([torch.zeros_like(total), z.sum() / total])
        share = (load / load.sum().clamp(min=1)).to(logits.dtype)
        mean = (probabilities * mask[..., None]).sum((0, 1)) / total
        return torch.stack([self.config.num_experts * (share * mean).sum(), z.sum() / total])

    @torch.no_grad()
    def _load(
        self,
        probabilities: Tensor,
        chosen: Tensor,
        mask: Tensor,
        kept: Tensor | None,
        z: Tensor,
    ) -> Tensor:
        """Return how many assignments every expert gets, [E] float64; in training of all replicas,
        and recorded.
        """
        counted = mask.double()
        if self.config.routing == "expert_choice":
            seen = counted[:, None].expand(-1, chosen.shape[1], -1).gather(-1, chosen)
            load, dropped = seen.sum((0, 2)), counted.new_zeros(())
        else:
            each = counted[..., None].expand(chosen.shape)
            load = counted.new_zeros(self.config.num_experts)
            load = load.scatter_add(0, chosen.flatten(), each.flatten())
            dropped = counted.new_zeros(()) if kept is None else each[~kept].sum()
        if not self.training:
            return load
        others = torch.stack([dropped, z.double().sum(), counted.sum()])
        sums: Tensor = self.over_replicas(torch.cat([load, others]))
        load, (dropped, squares, tokens) = sums[:-3], sums[-3:].unbind()
        self.step_load = load if self.step_load is None else self.step_load + load
        record = self.record
        if record is None:
            self.record = RouterRecord(load, dropped, squares, tokens)
        else:
            record.load, record.dropped = record.load + load, record.dropped + dropped
            record.z, record.tokens = record.z + squares, record.tokens + tokens
        return load

    @torch.no_grad()
    def finish_step(self) -> None:
        """Move the bias of every expert one step towards an even load; to be called after an
        optimizer step.
        """
        if self.config.balance == "bias" and self.step_load is not None:
            missing = self.step_load.mean() - self.step_load
            self.bias_steps += missing.sign().to(torch.int64)
        self.step_load = None


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _by_token_choice(
    chosen: Tensor, weights: Tensor, kept: Tensor | None, num_experts: int, losses: Tensor
) -> RoutedTokens:
    """Sort the choices [B, T, k] by expert."""
    experts, flat = chosen.flatten(), weights.flatten()
    if kept is None:
        order = experts.argsort(stable=True)
    else:
        left = kept.flatten().nonzero().squeeze(1)
        order = left[experts[left].argsort(stable=True)]
    counts = torch.zeros(num_experts, dtype=torch.int64, device=chosen.device)
    counts = counts.scatter_add(0, experts[order], torch.ones_like(order))
    return RoutedTokens(order // chosen.shape[-1], flat[order], counts, losses)


def _by_expert_choice(chosen: Tensor, weights: Tensor, length: int, losses: Tensor) -> RoutedTokens:
    """Sort the choices [B, E, C], each the place of a token in its sequence of T, by expert."""
    batch, experts, room = chosen.shape
    starts = torch.arange(batch, device=chosen.device)[:, None, None] * length
    tokens, flat = ((chosen + starts).transpose(0, 1).flatten(), weights.transpose(0, 1).flatten())
    counts = torch.full((experts,), batch * room, dtype=torch.int64, device=chosen.device)
    return RoutedTokens(tokens, flat, counts, losses)


class Experts(nn.Module):
    """E SwiGLU networks, computed for the tokens that were sent to them only.

    Args:
        num_experts: E.
        model_dim: D.
        ff_dim: F.
        backend: Of `grouped_product`.
    """

    def __init__(
        self, num_experts: int, model_dim: int, ff_dim: int, backend: GroupedBackend
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.gate = GroupedLinear(num_experts, model_dim, ff_dim, backend)
        self.up = GroupedLinear(num_experts, model_dim, ff_dim, backend)
        self.down = GroupedLinear(num_experts, ff_dim, model_dim, backend)

    def forward(
        self,
        hidden: Tensor,
        weights: Tensor,
        tokens: Tensor,
        counts: Tensor,
        beside: Beside = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Send every token to its experts and add up their weighted answers.

        Args:
            hidden: [B, T, D].
            weights: [A].
            tokens: [A], int64, sorted by expert.
            counts: [E], int64.
            beside: See `compute`.

        Returns:
            [B, T, D], 0 for a token without an expert; and what `beside` gives.
        """
        flat = hidden.flatten(0, 1)
        answers, other = self.compute(flat[tokens], counts, beside)
        weighted = (answers * weights[:, None].to(answers.dtype)).to(flat.dtype)
        return torch.zeros_like(flat).index_add(0, tokens, weighted).view_as(hidden), other

    def compute(
        self, x: Tensor, counts: Tensor, beside: Beside = None
    ) -> tuple[Tensor, Tensor | None]:
        """Map [A, D], sorted by expert, to [A, D]; where experts are divided among ranks, a
        strategy exchanges the rows around it.

        Args:
            x: [A, D].
            counts: [E], int64: rows of every expert.
            beside: Other work, done while rows are under way.
        """
        other = None if beside is None else beside()
        gated = F.silu(self.gate(x, counts)) * self.up(x, counts)
        return self.down(gated, counts), other


class Mixture(nn.Module):
    """What stands in the place of an MLP: a router, experts and, optionally, shared experts.

    Args:
        config: Sizes and kinds.
    """

    def __init__(self, config: MixtralConfig) -> None:
        super().__init__()
        ff_dim = config.ff_dim
        assert ff_dim is not None
        self.router = Router(config)
        self.experts = Experts(config.num_experts, config.model_dim, ff_dim, config.backend)
        shared = config.num_shared_experts * ff_dim
        self.shared = SwiGLU(config.model_dim, shared) if shared else None

    def forward(
        self, hidden: Tensor, noise: Tensor | None = None, counted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map [B, T, D] to [B, T, D] and the router's two losses [2]; the rest as in `Router`."""
        shared = self.shared
        beside = None if shared is None else lambda: shared(hidden)
        tokens, weights, counts, losses = self.router(hidden, noise, counted)
        mixed, other = self.experts(hidden, weights, tokens, counts, beside)
        return mixed if other is None else mixed + other, losses
