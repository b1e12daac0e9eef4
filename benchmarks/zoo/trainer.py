"""The training loop of the zoo: micro-batches, pipeline, ZeRO, clipping, Adam, checkpoints.

A step is `forward_backward`, then `update`. Every fault swaps a method of one of these classes.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from benchmarks.zoo.comm import AXES, Comm
from benchmarks.zoo.model import cut, Model, SHARDS, stages_of, TOKENWISE

__all__ = ["Adam", "Batch", "Data", "Trainer", "split"]

Batch = dict[str, Tensor]


class Data:
    """Samples of a text, in another order in every epoch; every rank reads the whole batch.

    Args:
        model: Its configuration says how long they are.
    """

    SIZE, HELD_OUT = 40, 13

    def __init__(self, model: Model) -> None:
        self.config, self.comm = model.config, model.comm
        generator = torch.Generator().manual_seed(1)
        shape = self.SIZE + self.HELD_OUT, self.config.tokens + 1
        # Steps up and down of at most 3: what comes next can be learned.
        steps = torch.randint(-3, 4, shape, generator=generator)
        self.rows = steps.cumsum(1) % self.config.vocabulary
        self.prompts = torch.randint(0, self.config.tokens - 2, shape[:1], generator=generator)

    def order(self, epoch: int) -> Tensor:
        """Return the numbers of the samples of an epoch."""
        return torch.randperm(self.SIZE, generator=torch.Generator().manual_seed(epoch))

    def batch(self, step: int) -> Batch:
        """Return the samples of a step, of all replicas."""
        steps = self.SIZE // self.config.samples
        first = step % steps * self.config.samples
        chosen = self.order(step // steps)[first : first + self.config.samples]
        rows = {"rows": self.rows[chosen], "prompts": self.prompts[chosen]}
        return {**rows, "step": torch.tensor(step)}

    def held_out(self) -> Batch:
        """Return the samples of the evaluation."""
        return {"rows": self.rows[self.SIZE :], "prompts": self.prompts[self.SIZE :]}


def split(batch: Batch) -> tuple[Tensor, Tensor]:
    """Return tokens and the labels of the same places; those of the prompt do not count."""
    tokens, labels = batch["rows"][:, :-1], batch["rows"][:, 1:]
    places = torch.arange(labels.shape[1])
    return tokens, torch.where(places < batch["prompts"][:, None], -100, labels)


class Adam:
    """AdamW on the parts of the parameters of which this rank has gradients."""

    def __init__(self, trainer: "Trainer") -> None:
        self.trainer, self.config, self.comm = trainer, trainer.config, trainer.comm
        self.count = 0
        parts = {n: trainer.part_of(p.detach()) for n, p in trainer.model.named_parameters()}
        self.first = {name: torch.zeros_like(part) for name, part in parts.items()}
        self.second = {name: torch.zeros_like(part) for name, part in parts.items()}

    def rate(self) -> float:
        """Return the learning rate of this step."""
        return self.config.lr * min(1.0, self.count / self.config.warmup)

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters."""
        self.count += 1
        for name, parameter in self.trainer.model.named_parameters():
            part = self.trainer.part_of(parameter)
            decay = self.config.decay if parameter.ndim > 1 else 0.0
            part = part - self.rate() * (self.direction(name) + decay * part)
            parameter.copy_(self.trainer.joined(part, parameter))

    def direction(self, name: str) -> Tensor:
        """Advance the moments of a parameter, and return where it goes."""
        grad, first, second = self.trainer.grads[name], self.first[name], self.second[name]
        first.mul_(0.9).add_(grad, alpha=0.1)
        second.mul_(0.99).addcmul_(grad, grad, value=0.01)
        scale = (second / (1 - 0.99**self.count)).sqrt() + 1e-8
        return first / (1 - 0.9**self.count) / scale


class Trainer:
    """Trains a model, or a rank's part of it.

    Args:
        model: Whole on one process, or made with the `Comm` of a rank; `load` gives it weights.

    Attributes:
        grads: Name -> reduced gradient; with ZeRO the flat part of this replica.
        norm: Of all gradients, in the last step.
    """

    def __init__(self, model: Model) -> None:
        self.model, self.comm, self.config = model, model.comm, model.config
        self.data = Data(model)
        self.grads = dict[str, Tensor]()
        self.norm = 0.0
        self.step = 0
        self.optimizer = Adam(self)

    @classmethod
    def of(cls, whole: Mapping[str, Tensor], like: Model, comm: Comm) -> "Trainer":
        """Return the trainer of a rank, given the weights of all."""
        trainer = cls(Model(like.config, comm).to(like.config.dtype))
        trainer.load_weights(whole)
        return trainer

    # A step

    def train_step(self) -> float:
        """Take a step, and return its loss."""
        loss = self.forward_backward(self.data.batch(self.step))
        self.update()
        self.step += 1
        return float(loss)

    def forward_backward(self, batch: Batch) -> Tensor:
        """Compute the loss of the whole batch, and `grads`."""
        self.model.train()
        for parameter in self.model.parameters():
            parameter.grad = None
        parts = self.divide(batch)
        total = self.count_labels(parts)
        kept, sums = [], torch.zeros(2, dtype=torch.float64)
        for number, (tokens, labels) in enumerate(parts):
            x, out = self.run_stage(tokens, labels, (int(batch["step"]), number))
            balance = self.config.balance * self.model.balances() / len(parts)
            loss = out / total if self.model.is_last else torch.zeros_like(balance)
            kept.append((x, out, loss, balance))
            sums += torch.stack([loss.detach(), balance.detach()]).double()
        for x, out, loss, balance in kept:
            self.run_stage_back(x, out, loss + balance)
        self.reduce_gradients()
        return self.reported(sums)

    def divide(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Return tokens and labels of this rank, for each micro-batch."""
        tokens, labels = split(batch)
        micro = self.comm.layout.micro
        pairs = zip(self.own(tokens).chunk(micro), self.own(labels).chunk(micro), strict=True)
        return [(self.comm.part(t, "cp", 1), self.comm.part(y, "cp", 1)) for t, y in pairs]

    def own(self, rows: Tensor) -> Tensor:
        """Return the rows of this replica, in the order of its micro-batches."""
        parts = [self.comm.part(part, "dp", 0) for part in rows.chunk(self.comm.layout.micro)]
        return torch.cat([self.comm.part(part, "ep", 0) for part in parts])

    def count_labels(self, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the number of labels that count, in all micro-batches of all replicas."""
        own = sum((labels >= 0).sum() for _, labels in parts)
        return self.comm.sum(torch.as_tensor(own), "dp", "ep", "cp")

    def run_stage(self, tokens: Tensor, labels: Tensor, seed: tuple[int, ...]) -> Any:
        """Run the forward of a micro-batch; return input and output of this stage."""
        x = tokens
        if not self.model.is_first:
            count = tokens.shape[1] // (self.comm.size("tp") if self.comm.layout.sequence else 1)
            like = torch.empty(len(tokens), count, self.config.dim, dtype=self.config.dtype)
            x = self.comm.receive(like, -1).requires_grad_()
        out = self.model(x, labels, seed)
        if not self.model.is_last:
            self.comm.send(out, 1)
        return x, out

    def run_stage_back(self, x: Tensor, out: Tensor, loss: Tensor) -> None:
        """Run the backward of a micro-batch."""
        if self.model.is_last:
            loss.backward()
        else:
            grad = self.comm.receive(out, 1)
            ends = [(out, grad), (loss, None)] if loss.requires_grad else [(out, grad)]
            torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])
        if not self.model.is_first:
            assert x.grad is not None
            self.comm.send(x.grad, -1)

    def reported(self, sums: Tensor) -> Tensor:
        """Return the loss of the whole batch, given this rank's cross entropy and balance."""
        loss, balance = self.comm.sum(sums, "dp", "ep", "cp")
        # Tensor-parallel ranks compute the same, but for the balance of tokens that they share.
        balance = self.comm.sum(balance, "tp") if self.comm.layout.sequence else balance
        return self.comm.sum(loss + balance, "pp")

    def reduce_gradients(self) -> None:
        """Add up what the ranks that hold a parameter have computed of its gradient."""
        for name, parameter in self.model.named_parameters():
            found = parameter.grad
            grad = self.reduce(name, torch.zeros_like(parameter) if found is None else found)
            self.grads[name] = grad
            if grad.shape == parameter.shape:
                parameter.grad = grad

    def reduce(self, name: str, grad: Tensor) -> Tensor:
        """Return the gradient of a parameter, or this replica's part of it."""
        last = name.rpartition(".")[2]
        if self.comm.layout.sequence and last in TOKENWISE:
            grad = self.comm.sum(grad, "tp")
        if name == "table":
            grad = self.comm.sum(grad, "pp")
        grad = self.comm.sum(grad, "cp")
        if not last.startswith("expert"):
            grad = self.comm.sum(grad, "ep")
        return self.part_of(self.comm.sum(grad, "dp"))

    def part_of(self, tensor: Tensor) -> Tensor:
        """Return what this replica updates of a parameter: all, or with ZeRO a flat part."""
        ranks = self.comm.size("dp")
        if not self.comm.layout.zero or ranks == 1:
            return tensor
        flat = tensor.flatten()
        return self.comm.part(F.pad(flat, (0, -len(flat) % ranks)), "dp", 0)

    def joined(self, part: Tensor, like: Tensor) -> Tensor:
        """Return a parameter from the parts of all replicas."""
        if part.shape == like.shape:
            return part
        return self.comm.gather(part, "dp", 0)[: like.numel()].view_as(like)

    def update(self) -> None:
        """Limit and clip the gradients, and update the parameters."""
        self.limit()
        self.clip()
        self.optimizer.step()

    def limit(self) -> None:
        """Limit every entry of every gradient."""
        for grad in self.grads.values():
            grad.clamp_(-self.config.limit, self.config.limit)

    def clip(self) -> None:
        """Scale all gradients so that their norm is at most `Config.clip`."""
        squares = [g.square().sum() / self.copies(name) for name, g in self.grads.items()]
        self.norm = float(self.comm.sum(torch.stack(squares).sum(), *AXES[1:]).sqrt())
        for grad in self.grads.values():
            grad.mul_(min(1.0, self.config.clip / (self.norm + 1e-6)))

    def copies(self, name: str) -> int:
        """Return how many ranks have the same part of a gradient."""
        divided = {axis for axis, _ in SHARDS.get(name.rpartition(".")[2], ())}
        if self.comm.layout.zero:
            divided.add("dp")
        stages = len(stages_of(name, self.comm.layout, self.config.layers))
        return stages * self.comm.size(*{"dp", "ep", "cp", "tp"} - divided)

    # What is whole

    def whole(self, what: str) -> dict[str, Tensor]:
        """Return weights, gradients or moments of all ranks, whole, on rank 0.

        Where ranks hold copies, it is their mean, so that a copy that differs is seen.
        """
        held = {
            "weights": dict(self.model.named_parameters()),
            "gradients": self.grads,
            "first": self.optimizer.first,
            "second": self.optimizer.second,
        }[what]
        like = dict(self.model.named_parameters())
        mine = {n: self.joined(t.detach(), like[n]).detach().clone() for n, t in held.items()}
        sent: Any = [(self.comm.place, mine)]
        if self.comm.layout.world > 1:
            sent = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object((self.comm.place, mine), sent)
        return self.join([rank for rank in sent or [] if rank[0]["idle"] == 0])

    def join(self, pieces: list[tuple[dict[str, int], dict[str, Tensor]]]) -> dict[str, Tensor]:
        """Return whole tensors from the pieces of ranks, by their places."""
        names = dict.fromkeys(name for _, held in pieces for name in held)
        return {name: self.join_one(name, pieces) for name in names}

    def join_one(self, name: str, pieces: Any) -> Tensor:
        """Return one of them."""
        shards = SHARDS.get(name.rpartition(".")[2], ())
        found = dict[tuple[int, ...], list[Tensor]]()
        for place, held in pieces:
            if name in held:
                found.setdefault(tuple(place[axis] for axis, _ in shards), []).append(held[name])
        means = {at: torch.stack(copies).mean(0) for at, copies in found.items()}
        for number in reversed(range(len(shards))):
            keys = sorted({at[:number] for at in means})
            groups = {k: [means[at] for at in sorted(means) if at[:number] == k] for k in keys}
            means = {k: torch.cat(parts, shards[number][1]) for k, parts in groups.items()}
        return means[()]

    # Checkpoints

    def load_weights(self, whole: Mapping[str, Tensor]) -> None:
        """Take this rank's parts of whole weights."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(cut(name, whole[name], self.comm))

    def save(self) -> dict[str, Any]:
        """Return a checkpoint, the same on every rank, that any layout can load."""
        found: dict[str, Any] = {w: self.whole(w) for w in ("weights", "first", "second")}
        box = [{**found, "count": self.optimizer.count, "step": self.step}]
        if self.comm.layout.world > 1:
            dist.broadcast_object_list(box)
        return box[0]

    def load(self, saved: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.load_weights(saved["weights"])
        self.load_moments(saved)
        self.optimizer.count = saved["count"]
        self.step = saved["step"]

    def load_moments(self, saved: Mapping[str, Any]) -> None:
        """Take this rank's parts of whole moments."""
        for moments, whole in itertools.zip_longest(
            (self.optimizer.first, self.optimizer.second), (saved["first"], saved["second"])
        ):
            for name in moments:
                moments[name].copy_(self.part_of(cut(name, whole[name], self.comm)))

    # Evaluation

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Return the mean loss of the labels of held out samples."""
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        for tokens, labels in self.deal(batch):
            _, out = self.run_stage(tokens, labels, (0, 0))
            if self.model.is_last:
                sums += torch.stack([out, (labels >= 0).sum()]).double()
        return self.mean(sums)

    def deal(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """Return this replica's samples one by one; a sample without labels fills a gap."""
        tokens, labels = split(batch)
        gap = -len(tokens) % self.comm.size("dp", "ep")
        tokens, labels = F.pad(tokens, (0, 0, 0, gap)), F.pad(labels, (0, 0, 0, gap), value=-100)
        place = self.comm.place["dp"] * self.comm.size("ep") + self.comm.place["ep"]
        pairs = [t[place :: self.comm.size("dp", "ep")] for t in (tokens, labels)]
        rows = zip(*(self.comm.part(t, "cp", 1).split(1) for t in pairs), strict=True)
        return list(rows)

    def mean(self, sums: Tensor) -> Tensor:
        """Return the mean over all replicas, given a rank's sum of losses and number of labels."""
        total, count = self.comm.sum(self.comm.sum(sums, "dp", "ep", "cp"), "pp")
        return total / count
