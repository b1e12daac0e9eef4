"""Learning curves of islands: the same tiny GPT reads the same bytes (the sources of Python's
standard library) in the same order, in step and as islands.

All islands live in this process and take turns. Server, messages and rounds are those of the
product: each island has an `ShardedClient`, and all meet an `IslandServer`. What is printed is the
loss of held-out text, in nats, of the weights that all share at the end.

A run is named by what is not as usual, as in ``count=8,steps=2000,every=30,optimizer=average``:
``count`` (of islands), ``batch`` (samples of one in a step), ``steps``, ``inner_lr`` and ``beta2``
(of AdamW), ``first`` (steps in step, from whose weights and optimizer the islands begin),
``first_every`` (if they are steps of islands that average so often), and the fields of `Outer`.
``every=0`` is a run in step to its end. ``model_dim`` and ``num_layers`` are those of the GPT.
"""

import argparse
import copy
import json
import statistics
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _learn import quiet
from torch import Tensor

from lightning_par import Outer
from lightning_par.checkpoint.pieces import Piece
from lightning_par.engine.data.islands.client import Place
from lightning_par.engine.data.islands.coding import whole_box
from lightning_par.engine.data.islands.server import IslandServer
from lightning_par.engine.data.islands.shards import ShardedClient
from lightning_par.models import GPTModule, TextDataModule

LENGTH, KEY = 64, b"a key of the benchmark only"
"""T, and the shared key."""
USUAL: dict[str, Any] = {"seed": 0, "count": 4, "steps": 1000, "inner_lr": 3e-3, "first": 0}
USUAL |= {"first_every": 0, "every": 30, "beta2": 0.95, "batch": 8}
USUAL |= {"model_dim": 64, "num_layers": 3}


class Learner:
    """A replica with an optimizer of its own."""

    def __init__(self, run: dict[str, Any]) -> None:
        torch.manual_seed(run["seed"])
        betas = 0.9, run["beta2"]
        module = GPTModule(
            overrides={name: run[name] for name in ("model_dim", "num_layers")},
            lr=run["inner_lr"],
            betas=betas,
            max_steps=run["steps"],
            warmup_steps=50,
        )
        module.configure_model()
        self.model = module.model
        made: Any = module.configure_optimizers()
        self._optimizer, self._schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]

    def step(self, batch: dict[str, Tensor], factor: float = 1.0) -> None:
        """Make one step of the optimizer, at this factor of the rate of the schedule."""
        self.loss(batch).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] *= factor
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()

    def loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the mean loss per token."""
        logits = self.model(batch["input_ids"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    def take(self, other: "Learner") -> None:
        """Go on from the weights, the optimizer and the schedule of another one."""
        self.model.load_state_dict(other.model.state_dict())
        self._optimizer.load_state_dict(other._optimizer.state_dict())
        self._schedule.load_state_dict(other._schedule.state_dict())

    def move_on(self, step: int) -> None:
        """Move the schedule on to a step."""
        for _ in range(step):
            self._schedule.step()

    def keep(self) -> dict[str, Any]:
        """Return a copy of the state of the optimizer."""
        return copy.deepcopy(self._optimizer.state_dict()["state"])

    def restore(self, state: dict[str, Any]) -> None:
        """Take such a state."""
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def client(
        self, outer: Outer, port: int, island: int, incarnation: str = "only"
    ) -> ShardedClient:
        """Return the connection of this replica as an island."""
        named = dict(self.model.named_parameters())
        pieces = [Piece(whole_box(n, p.shape), tuple(p.shape), p.data) for n, p in named.items()]
        place = Place(
            server=f"127.0.0.1:{port}",
            key=KEY,
            island=island,
            rank=0,
            world=1,
            incarnation=incarnation,
        )
        boxes = frozenset(piece.box for piece in pieces)
        sizes = {name: parameter.numel() for name, parameter in named.items()}
        return ShardedClient(outer, place, pieces, boxes, frozenset(named), sizes)


def parted(batch: dict[str, Tensor], island: int, islands: int) -> dict[str, Tensor]:
    """Return the samples of an island, which take turns as replicas do."""
    return {name: values[island::islands] for name, values in batch.items()}


def train_islands(learners: list[Learner], outer: Outer, batches: Iterator[Any]) -> None:
    """Train islands on batches, and give all of them the weights that they share at the end."""
    count = len(learners)
    server = IslandServer("127.0.0.1", 0, KEY)
    server.meeting.expect(count)
    with closing(server), ThreadPoolExecutor(count) as pool:
        clients = [learner.client(outer, server.port, i) for i, learner in enumerate(learners)]
        list(pool.map(ShardedClient.join, clients))
        for batch in batches:
            for island, learner in enumerate(learners):
                learner.step(parted(batch, island, count))
            list(pool.map(lambda client: client.after_step(1), clients))
        list(pool.map(lambda client: client.finish(0), clients))
        list(pool.map(ShardedClient.leave, clients))


def learn(run: dict[str, Any]) -> float:
    """Train once; return the loss of held-out text."""
    run = {**USUAL, **run}
    count, steps = run["count"], run["steps"]
    data = TextDataModule(length=LENGTH, batch_size=run["batch"] * count, seed=run["seed"])
    data.setup("fit")
    loader = data.train_dataloader()
    batches = (batch for _ in iter(int, 1) for batch in loader)
    first = run["first"] if run["every"] else steps
    learner = Learner(run)
    learners = [learner] + [Learner(run) for _ in range(count - 1 if run["every"] else 0)]
    if run["first_every"]:
        outer = Outer(every=run["first_every"], optimizer="average", min_islands=count)
        train_islands(learners, outer, islice(batches, first))
    else:
        for batch in islice(batches, first):
            learner.step(batch)
        for other in learners[1:]:
            other.take(learner)
    if run["every"]:
        fields = {name: run[name] for name in Outer.__dataclass_fields__ if name in run}
        outer = Outer(**{"min_islands": count, **fields})
        train_islands(learners, outer, islice(batches, steps - first))
    with torch.no_grad():
        return statistics.fmean(float(learner.loss(batch)) for batch in data.val_dataloader())


def read_run(text: str) -> dict[str, Any]:
    """Return the fields of a run by its name."""
    run: dict[str, Any] = {}
    for field in filter(None, text.split(",")):
        name, _, value = field.partition("=")
        try:
            run[name] = json.loads(value)
        except ValueError:
            run[name] = value
    return run


def main() -> None:
    """Train every run once for each seed, and print each as it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    usual = ["steps=500,every=0", "steps=500,every=8,optimizer=average"]
    parser.add_argument("runs", nargs="*", default=usual)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, help="file to which a line of JSON is added per run")
    options = parser.parse_args()
    quiet()
    for text in options.runs:
        for seed in options.seeds:
            began = time.monotonic()
            found = learn({**read_run(text), "seed": seed})
            print(f"{text:<70} seed {seed}  {found:.4f}", flush=True)
            print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps({"run": text, "seed": seed, "loss": found}) + "\n")


if __name__ == "__main__":
    main()
