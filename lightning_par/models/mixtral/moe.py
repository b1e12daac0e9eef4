"""Mixture-of-experts layer: router, experts and optional shared experts.

Shapes: B batch, T tokens, N = B T, D model dim, F feed-forward dim, E experts, k of them per token,
A assignments (a token and one of its experts).

Note [Equality with one process]: routing never depends on other sequences: capacity is per
sequence, and beyond it later tokens are dropped. The balance loss of a layer, ``E sum_e f_e P_e``,
has the fraction f_e of assignments to expert e, summed over the replicas by `ReplicaSum`, and the
mean probability P_e over this replica's tokens. f has no gradient and P is a mean, so the mean of
the losses over the replicas is the loss of the global batch. A pipeline sees one micro-batch at a
time, so there f is summed over the micro-batches with the same index on all replicas; the bias of
``balance="bias"`` is not affected, since it moves once per optimizer step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par.models.layers import SwiGLU
from lightning_par.models.mixtral.config import MixtralConfig
from lightning_par.models.mixtral.grouped_linear import GroupedBackend, GroupedLinear, RowCounts
from lightning_par.upstream.autograd import is_in_backward

__all__ = ["Beside", "Experts", "MoELayer", "ReplicaSum", "RoutedTokens", "Router", "RouterRecord"]

Beside = Callable[[], Tensor] | None
"""Work that overlaps with the all-to-all of the experts (shared experts); None: no such work."""


class RoutedTokens(NamedTuple):
    """Assignment of tokens to experts.

    Attributes:
        tokens: [A], int64: index of the token in [N]; sorted by expert, then by token. Assignments
            beyond the capacity of their expert are at the end.
        weights: [A]: gate weight of the expert's output.
        counts: [E], int64: number of assignments of every expert within its capacity.
        losses: [2], float32 or wider: balance loss and z-loss.
        capacity: The most assignments that an expert can have, by the shapes alone; None: A.
        kept: [A], bool: which assignments are within the capacity; None: all.
    """

    tokens: Tensor
    weights: Tensor
    counts: Tensor
    losses: Tensor
    capacity: int | None = None
    kept: Tensor | None = None


@dataclass(frozen=True)
class RouterRecord:
    """Statistics of one router in training, summed over all replicas since the last reset.

    Args:
        sums: [E + 3], float64: `load`, `dropped`, `z` and `tokens`.
    """

    sums: Tensor

    @property
    def load(self) -> Tensor:
        """[E]: number of assignments of every expert, dropped ones included."""
        return self.sums[:-3]

    @property
    def dropped(self) -> Tensor:
        """Scalar: number of dropped assignments."""
        return self.sums[-3]

    @property
    def z(self) -> Tensor:
        """Scalar: sum over the tokens of the squared log-sum-exp of the logits."""
        return self.sums[-2]

    @property
    def tokens(self) -> Tensor:
        """Scalar: number of tokens."""
        return self.sums[-1]


class ReplicaSum(nn.Module):
    """Placeholder of an all-reduce over the replicas: the identity on one device.

    A strategy with several replicas replaces its forward (`ParallelPlan.replica_sums`).
    """

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the sum of `numbers` over the replicas, without a gradient.

        Args:
            numbers: Tensor of any shape, the same on every replica.
        """
        return numbers


class Router(nn.Module):
    """Router: selects the experts of each token and their gate weights.

    ``top_k``: the k most likely experts, their probabilities renormalized to sum 1 (Mixtral).
    ``switch``: the most likely expert, weighted by its probability, up to its capacity.
    ``noisy_top_k``: in training, the k highest logits after noise of a learned scale.
    ``expert_choice``: every expert selects its most likely tokens of a sequence; not causal.

    With ``balance="bias"``, ``bias_rate * bias_steps`` is added to the probabilities for the
    selection, not for the gate weights.

    Args:
        config: Configuration of the model.

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
        # Whole steps of +-1 and not their sum in floats: exact, whatever the weights' dtype.
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
            counted: [B, T], bool: tokens that count in the losses; None: all.
        """
        # Rounding of 16 bits would change which experts are selected.
        logits = _upcast(self.gate(hidden))
        scores = logits
        if self.noise is not None and noise is not None:
            scores = logits + noise * F.softplus(_upcast(self.noise(hidden)))
        probabilities = scores.softmax(-1)
        chosen, weights, kept = self._choose(scores, probabilities)
        mask = torch.ones_like(logits[..., 0]) if counted is None else counted.to(logits.dtype)
        losses = self._losses(logits, probabilities, chosen, mask, kept)
        if self.config.routing == "expert_choice":
            return _by_expert_choice(chosen, weights, logits.shape[1], losses)
        batch, length, experts = logits.shape
        capacity = batch * (length if kept is None else self.config.capacity(length))
        return _by_token_choice(chosen, weights, kept, experts, losses, capacity)

    def _choose(
        self, scores: Tensor, probabilities: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Select experts.

        Returns:
            Token choice: experts [B, T, k], weights [B, T, k], and which are within capacity
            [B, T, k] (None: all). Expert choice: positions of tokens [B, E, C], weights [B, E, C],
            None.
        """
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
            # Place of every token in its expert's queue: how many tokens before it chose the same.
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
        """Return balance loss and z-loss, [2], as means over the counted tokens."""
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
        """Return the load [E], float64: the number of assignments of every expert.

        In training it is summed over all replicas, and added to the record.
        """
        counted = mask.double()
        if self.config.routing == "expert_choice":
            seen = counted[:, None].expand(-1, chosen.shape[1], -1).gather(-1, chosen)
            load, dropped = seen.sum((0, 2)), counted.new_zeros(())
        else:
            each = counted[..., None].expand(chosen.shape)
            load = counted.new_zeros(self.config.num_experts)
            load = load.scatter_add(0, chosen.flatten(), each.flatten())
            dropped = counted.new_zeros(()) if kept is None else (each * ~kept).sum()
        if not self.training:
            return load
        # One all-reduce for all of them.
        others = torch.stack([dropped, z.double().sum(), counted.sum()])
        sums: Tensor = self.over_replicas(torch.cat([load, others]))
        load, nothing = sums[:-3], torch.zeros_like(sums)
        # A recomputed forward has to run the operations of the first one, and counts nothing.
        record = RouterRecord(sums + (nothing if self.record is None else self.record.sums))
        step_load = load + (nothing[:-3] if self.step_load is None else self.step_load)
        if not is_in_backward():
            self.record, self.step_load = record, step_load
        return load

    @torch.no_grad()
    def finish_step(self) -> None:
        """Update the bias of every expert by one step towards an even load.

        To be called after every optimizer step.
        """
        if self.config.balance == "bias" and self.step_load is not None:
            # The sign alone counts (2408.15664), so that one outlier does not move the bias far.
            missing = self.step_load.mean() - self.step_load
            self.bias_steps += missing.sign().to(torch.int64)
        self.step_load = None


def _upcast(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _by_token_choice(
    chosen: Tensor,
    weights: Tensor,
    kept: Tensor | None,
    num_experts: int,
    losses: Tensor,
    capacity: int,
) -> RoutedTokens:
    """Sort the assignments [B, T, k] by expert, those beyond capacity behind all others."""
    experts, flat = chosen.flatten(), weights.flatten()
    if kept is not None:  # left where they are, as the host would wait for how many are kept
        experts = experts.where(kept.flatten(), num_experts)
    # Stable: within an expert tokens keep their order, so sums do too.
    order = experts.argsort(stable=True)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=chosen.device)
    counts = counts.scatter_add(0, experts, torch.ones_like(experts))[:num_experts]
    if kept is not None:
        kept = kept.flatten()[order]
    tokens = order // chosen.shape[-1]
    return RoutedTokens(tokens, flat[order], counts, losses, capacity, kept)


def _by_expert_choice(chosen: Tensor, weights: Tensor, length: int, losses: Tensor) -> RoutedTokens:
    """Sort the assignments [B, E, C], each a position in its sequence of T tokens, by expert."""
    batch, experts, room = chosen.shape
    starts = torch.arange(batch, device=chosen.device)[:, None, None] * length
    tokens, flat = ((chosen + starts).transpose(0, 1).flatten(), weights.transpose(0, 1).flatten())
    counts = torch.full((experts,), batch * room, dtype=torch.int64, device=chosen.device)
    return RoutedTokens(tokens, flat, counts, losses, batch * room)


def _keep(rows: Tensor, kept: Tensor | None) -> Tensor:
    """Return 0 in place of the rows of no expert, also as their gradient: both may be NaN."""
    return rows if kept is None else torch.where(kept[:, None], rows, 0)


class Experts(nn.Module):
    """E SwiGLU experts, each computed for its assigned tokens only.

    Args:
        num_experts: E.
        model_dim: D.
        ff_dim: F.
        backend: Kernel of the matrix products; see `grouped_product`.
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
        capacity: int | None = None,
        kept: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Permute tokens to their experts, compute them, and sum the weighted outputs per token.

        Args:
            hidden: [B, T, D].
            weights: [A]; see `RoutedTokens`.
            tokens: [A], int64; see `RoutedTokens`.
            counts: [E], int64; see `RoutedTokens`.
            beside: Work that overlaps with the communication; see `compute`.
            capacity: See `RoutedTokens`.
            kept: See `RoutedTokens`.

        Returns:
            [B, T, D], 0 for a token without an expert; and the result of `beside`, or None.
        """
        flat = hidden.flatten(0, 1)
        rows = _keep(flat[tokens], kept)
        outputs, other = self.compute(rows, counts, beside, capacity)
        outputs = _keep(outputs, kept)
        weighted = (outputs * weights[:, None].to(outputs.dtype)).to(flat.dtype)
        # A token has up to k outputs, which index_add sums.
        return torch.zeros_like(flat).index_add(0, tokens, weighted).view_as(hidden), other

    def compute(
        self,
        x: Tensor,
        counts: Tensor,
        beside: Beside = None,
        capacity: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Map [A, D] to [A, D], each row by its expert.

        With expert parallelism a strategy wraps it in the two all-to-alls, which need `capacity`.

        Args:
            x: [A, D], rows sorted by expert; behind them may be others, of no expert.
            counts: [E], int64: number of rows of every expert.
            beside: Work to overlap with the all-to-all, such as shared experts.
            capacity: See `RoutedTokens`.

        Returns:
            [A, D], and the result of `beside`, or None. Rows of no expert have no meaning.
        """
        other = None if beside is None else beside()
        rows = RowCounts(counts)
        gated = F.silu(self.gate(x, rows)) * self.up(x, rows)
        return self.down(gated, rows), other


class MoELayer(nn.Module):
    """Mixture-of-experts layer in place of an MLP: router, experts, optional shared experts.

    Args:
        config: Configuration of the model.
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
        """Map [B, T, D] to [B, T, D].

        Args:
            hidden: [B, T, D].
            noise: [B, T, E]; see `Router.forward`.
            counted: [B, T], bool; see `Router.forward`.

        Returns:
            [B, T, D], and balance loss and z-loss of the router, [2].
        """
        shared = self.shared
        # Not computed here: the experts call it while their all-to-all is in flight.
        beside = None if shared is None else lambda: shared(hidden)
        routed: RoutedTokens = self.router(hidden, noise, counted)
        tokens, weights, counts, losses, capacity, kept = routed
        mixed, other = self.experts(hidden, weights, tokens, counts, beside, capacity, kept)
        return mixed if other is None else mixed + other, losses
