"""A small GPT with experts, written once: for one process, and for a rank of any layout.

B samples, T tokens, D model dim, V vocabulary, E experts, C capacity. A rank holds its part of
every parameter (`SHARDS`), T/cp tokens of its samples, and T/cp/tp of them between the matrices
where `Layout.sequence` is on.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn, Tensor
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo.comm import Comm, Layout

__all__ = ["SHARDS", "TOKENWISE", "Config", "Model", "build", "cut", "stages_of"]

SHARDS: dict[str, tuple[tuple[str, int], ...]] = {
    "table": (("tp", 0),),
    "qkv": (("tp", 1),),
    "out": (("tp", 1),),
    "up": (("tp", 0),),
    "up_bias": (("tp", 0),),
    "down": (("tp", 1),),
    "expert_up": (("ep", 0), ("tp", 1)),
    "expert_down": (("ep", 0), ("tp", 2)),
}
"""Last part of a parameter's name -> axes over which it is divided, and the dim of each."""

TOKENWISE = ("positions", "norm", "out_bias", "down_bias", "router")
"""What works on single tokens: with `Layout.sequence` a rank has a part of its gradient."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes of the model and options of the run; each dim has its own size."""

    vocabulary: int = 24
    tokens: int = 12
    dim: int = 20
    heads: int = 4
    inner: int = 28
    layers: int = 2
    experts: int = 0
    dropout: float = 0.0
    recompute: bool = False
    balance: float = 0.1
    lr: float = 0.01
    warmup: int = 4
    decay: float = 0.1
    clip: float = 0.5
    limit: float = 0.05
    samples: int = 8
    dtype: torch.dtype = torch.float64


class Norm(nn.Module):
    """RMSNorm."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.norm


class Attention(nn.Module):
    """Causal attention; heads are divided over tp, tokens over cp."""

    def __init__(self, config: Config, comm: Comm) -> None:
        super().__init__()
        self.comm, self.head = comm, config.dim // config.heads
        self.qkv = nn.Parameter(torch.empty(3, config.dim, config.dim))
        self.out = nn.Parameter(torch.empty(config.dim, config.dim))
        self.out_bias = nn.Parameter(torch.zeros(config.dim))

    def forward(self, x: Tensor) -> Tensor:
        qkv = torch.einsum("btd,sed->sbte", self.comm.enter(x), self.qkv)
        q, k, v = qkv.unflatten(-1, (-1, self.head)).unbind(0)
        k, v = self.comm.collect(k, "cp"), self.comm.collect(v, "cp")
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / math.sqrt(self.head)
        scores = scores.masked_fill(self.later(q, k), -math.inf)
        mixed = torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1), v).flatten(2)
        return self.comm.leave(mixed @ self.out.T) + self.out_bias

    def later(self, q: Tensor, k: Tensor) -> Tensor:
        """Return which keys come after which queries."""
        first = self.comm.place["cp"] * q.shape[1]
        at = torch.arange(first, first + q.shape[1])
        return torch.arange(k.shape[1])[None, :] > at[:, None]


class Dense(nn.Module):
    """Two matrices with a nonlinearity between them."""

    def __init__(self, config: Config, comm: Comm) -> None:
        super().__init__()
        self.comm = comm
        self.up = nn.Parameter(torch.empty(config.inner, config.dim))
        self.up_bias = nn.Parameter(torch.zeros(config.inner))
        self.down = nn.Parameter(torch.empty(config.dim, config.inner))
        self.down_bias = nn.Parameter(torch.zeros(config.dim))

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(self.comm.enter(x) @ self.up.T + self.up_bias)
        return self.comm.leave(inner @ self.down.T) + self.down_bias


class Experts(nn.Module):
    """Every token goes to one expert; experts are divided over ep, their matrices over tp.

    Attributes:
        balance: Loss of the last forward that keeps experts evenly used; this rank's part of it.
    """

    def __init__(self, config: Config, comm: Comm) -> None:
        super().__init__()
        self.comm, self.count = comm, config.experts
        self.router = nn.Parameter(torch.empty(config.experts, config.dim))
        self.expert_up = nn.Parameter(torch.empty(config.experts, config.inner, config.dim))
        self.expert_down = nn.Parameter(torch.empty(config.experts, config.dim, config.inner))
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        odds = (x @ self.router.T).softmax(-1)
        gate, choice = odds.max(-1)
        self.balance = self.measure_balance(odds, choice)
        if self.comm.layout.sequence:
            choice = self.comm.gather(choice, "tp", 1)
        tokens = self.comm.enter(x)
        rows, slots = self.pack(tokens.flatten(0, 1), choice.flatten())
        answers = self.compute(rows)
        found = self.unpack(answers, slots).unflatten(0, tokens.shape[:2])
        return self.comm.leave(found) * gate[..., None]

    def measure_balance(self, odds: Tensor, choice: Tensor) -> Tensor:
        """Return this rank's part of E * sum over e of (share of e) * (mean odds of e)."""
        used = F.one_hot(choice.flatten(), self.count).sum(0).to(odds.dtype)
        used = self.comm.sum(used, "dp", "ep", "cp")
        if self.comm.layout.sequence:
            used = self.comm.sum(used, "tp")
        return self.count * (used / used.sum() * odds.flatten(0, 1).sum(0) / used.sum()).sum()

    def capacity(self, tokens: int) -> int:
        """Return how many rows an expert takes of one rank; here all of them."""
        return tokens

    def pack(self, tokens: Tensor, choice: Tensor) -> tuple[Tensor, Tensor]:
        """Return a row for each slot of an expert [E*C, D], and the slot of every token."""
        room = self.capacity(len(tokens))
        order = F.one_hot(choice, self.count).cumsum(0).gather(1, choice[:, None])[:, 0] - 1
        slots = choice * room + order.clamp(max=room - 1)
        rows = tokens.new_zeros(self.count * room, tokens.shape[1])
        return rows.index_copy(0, slots, tokens), slots

    def compute(self, rows: Tensor) -> Tensor:
        """Return what the experts answer, each on its own rank."""
        own, ranks = len(self.expert_up), self.comm.size("ep")
        got = self.comm.exchange(rows).unflatten(0, (ranks, own, -1)).transpose(0, 1).flatten(1, 2)
        inner = F.gelu(torch.einsum("end,efd->enf", got, self.expert_up))
        answers = torch.einsum("enf,edf->end", inner, self.expert_down)
        back = answers.unflatten(1, (ranks, -1)).transpose(0, 1).flatten(0, 2)
        return self.comm.exchange(back)

    def unpack(self, answers: Tensor, slots: Tensor) -> Tensor:
        """Return the answer to every token."""
        return answers[slots]


class Block(nn.Module):
    """A layer, with dropout after both halves."""

    def __init__(self, config: Config, comm: Comm, number: int) -> None:
        super().__init__()
        self.comm, self.config, self.number = comm, config, number
        self.first, self.second = Norm(config.dim), Norm(config.dim)
        self.attention = Attention(config, comm)
        sparse = config.experts and number % 2
        self.mlp: Dense | Experts = (Experts if sparse else Dense)(config, comm)

    def forward(self, x: Tensor, seed: tuple[int, ...]) -> Tensor:
        x = x + self.drop(self.attention(self.first(x)), (*seed, self.number, 0))
        return x + self.drop(self.mlp(self.second(x)), (*seed, self.number, 1))

    def drop(self, x: Tensor, seed: tuple[int, ...]) -> Tensor:
        """Drop entries; the mask is this rank's part of that of the whole micro-batch."""
        if not self.config.dropout or not self.training:
            return x
        return x * self.mask(x, seed) / (1 - self.config.dropout)

    def mask(self, x: Tensor, seed: tuple[int, ...]) -> Tensor:
        """Return which entries stay."""
        whole = self.draw(x.shape[0] * self.comm.size("dp", "ep"), self.config.tokens, seed)
        mine = self.comm.part(self.comm.part(whole, "dp", 0), "ep", 0)
        mine = self.comm.part(mine, "cp", 1)
        return self.comm.part(mine, "tp", 1) if self.comm.layout.sequence else mine

    def draw(self, samples: int, tokens: int, seed: tuple[int, ...]) -> Tensor:
        """Draw which entries of so many samples and tokens stay."""
        generator = torch.Generator().manual_seed(abs(hash(seed)) % 2**60)
        odds = torch.rand(samples, tokens, self.config.dim, generator=generator)
        return (odds >= self.config.dropout).to(self.config.dtype)


class Model(nn.Module):
    """The blocks of one stage, with the table of tokens on the first and on the last one."""

    def __init__(self, config: Config, comm: Comm) -> None:
        super().__init__()
        self.config, self.comm = config, comm
        self.is_first = comm.place["pp"] == 0
        self.is_last = comm.place["pp"] == comm.layout.pp - 1
        if self.is_first or self.is_last:
            self.table = nn.Parameter(torch.empty(config.vocabulary, config.dim))
        if self.is_first:
            self.positions = nn.Parameter(torch.empty(config.tokens, config.dim))
        if self.is_last:
            self.final = Norm(config.dim)
        count = config.layers // comm.layout.pp
        numbers = range(count * comm.place["pp"], count * (comm.place["pp"] + 1))
        self.blocks = nn.ModuleDict({str(n): Block(config, comm, n) for n in numbers})
        for name, parameter in self.named_parameters():
            parameter.data = cut(name, parameter.data, comm).clone()

    def forward(self, x: Tensor, labels: Tensor, seed: tuple[int, ...]) -> Tensor:
        """Return the activations for the next stage, or on the last one the sum of the losses.

        Args:
            x: Numbers of tokens [B, T/cp] on the first stage, activations on others.
            labels: Of the same tokens; negative: they do not count.
            seed: Of dropout: run, step and micro-batch.
        """
        x = self.embed(x) if self.is_first else x
        for block in self.blocks.values():
            again = self.config.recompute and self.training
            x = checkpoint(block, x, seed, use_reentrant=False) if again else block(x, seed)
        return self.losses(self.final(x), labels).sum() if self.is_last else x

    def embed(self, tokens: Tensor) -> Tensor:
        """Return what the table, of which each tensor-parallel rank has some rows, says."""
        first = self.comm.place["tp"] * len(self.table)
        inside = (tokens >= first) & (tokens < first + len(self.table))
        rows = F.embedding((tokens - first) * inside, self.table) * inside[..., None]
        places = self.positions[self.places(tokens.shape[1])]
        if self.comm.layout.sequence:
            places = self.comm.part(places, "tp", 0)
        return self.comm.leave(rows) + places

    def places(self, count: int) -> Tensor:
        """Return the positions of this rank's tokens."""
        first = self.comm.place["cp"] * count
        return torch.arange(first, first + count)

    def losses(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the cross entropy of every token; each tensor-parallel rank has some logits."""
        logits = self.comm.enter(x) @ self.table.T
        logits = logits - self.comm.max(logits.detach().amax(-1, keepdim=True), "tp")
        total = self.comm.add_up(logits.exp().sum(-1), "tp")
        first = self.comm.place["tp"] * len(self.table)
        inside = (labels >= first) & (labels < first + len(self.table))
        chosen = logits.gather(-1, ((labels - first) * inside)[..., None])[..., 0] * inside
        return (total.log() - self.comm.add_up(chosen, "tp")) * (labels >= 0)

    def balances(self) -> Tensor:
        """Return the sum of the losses of the routers in the last forward."""
        found = [b.mlp.balance for b in self.blocks.values() if isinstance(b.mlp, Experts)]
        return torch.stack(found).sum() if found else torch.zeros((), dtype=self.config.dtype)


def build(config: Config, seed: int = 0) -> Model:
    """Return the whole model of one process, with weights that differ from each other."""
    model = Model(config, Comm()).to(config.dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            scale = 0.3 if name == "table" else 1 / math.sqrt(parameter.shape[-1])
            parameter.copy_(
                1 + 0.1 * drawn if parameter.ndim == 1 and "norm" in name else drawn * scale
            )
    return model


def stages_of(name: str, layout: Layout, layers: int) -> list[int]:
    """Return the stages that hold a parameter."""
    if name == "table":
        return sorted({0, layout.pp - 1})
    if name.startswith("blocks."):
        return [int(name.split(".")[1]) // (layers // layout.pp)]
    return [0] if name == "positions" else [layout.pp - 1]


def cut(name: str, whole: Tensor, comm: Comm) -> Tensor:
    """Return this rank's part of a parameter, or of what has its shape."""
    for axis, dim in SHARDS.get(name.rpartition(".")[2], ()):
        whole = comm.part(whole, axis, dim)
    return whole
