"""What it costs that islands are killed and come back: a tiny GPT, as in ``islands_learning.py``.

All islands live in this process and take turns, so that a run does not depend on the speed of the
machine; server, messages and rounds are those of the product. A random island is killed, ``away``
turns later it is back, and so on. A round waits for all islands that are there (``grace=inf``); an
island that waits makes no step in that turn.
What is printed is the loss of held-out text, in nats, of the weights that all share at the end, and
the part of all possible steps that was made.

A run is named as in ``islands_learning.py``, with ``kills``, ``away``, and ``back``, the optimizer
of an island that comes back: ``new``, ``own`` (as of its last exchange) or ``warm`` (new, and its
rate grows to that of the schedule in 20 steps).
"""

import argparse
import random
import statistics
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from itertools import islice
from typing import Any

import torch
from _learn import quiet
from islands_learning import KEY, Learner, LENGTH, parted, read_run, USUAL

from lightning_par import Outer
from lightning_par.engine.data.islands.server import IslandServer
from lightning_par.models import TextDataModule

USUAL = {**USUAL, "every": 20, "optimizer": "average", "kills": 4, "away": 10, "back": "new"}
USUAL |= {"steps": 400, "model_dim": 32, "num_layers": 2}
WARM = 20
"""Steps of the warm-up of an island that comes back."""


class Island:
    """An island that may be away; what it would find on its disk outlives it."""

    def __init__(self, number: int, run: dict[str, Any], outer: Outer, port: int) -> None:
        self.number, self.run, self.outer, self.port = number, run, outer, port
        self.incarnation = 0
        self.place, self.kept = 0, None
        self.made = 0
        self.answer: Future[None] | None = None

    def start(self) -> None:
        """Come, or come back."""
        self.incarnation += 1
        self.learner = Learner(self.run)
        self.client = self.learner.client(
            self.outer, self.port, self.number, f"start {self.incarnation}"
        )
        self.client.join()
        self.learner.move_on(self.client.step)
        self.back = 0 if self.incarnation > 1 else WARM
        if self.kept is not None and self.run["back"] == "own":
            self.learner.restore(self.kept)
        self.at = self.place

    def kill(self) -> None:
        """Lose what was not exchanged."""
        self.client.close()
        self.answer = None

    def step(self, batches: list[Any]) -> None:
        """Make a step."""
        self.back += 1
        slow = self.run["back"] == "warm" and self.back < WARM
        batch = parted(batches[self.at % len(batches)], self.number, self.run["count"])
        self.learner.step(batch, self.back / WARM if slow else 1.0)
        self.at, self.made = self.at + 1, self.made + 1

    def exchange(self) -> None:
        """Exchange what is due."""
        due = self.client.exchanges_next
        self.client.after_step(1)
        if due:
            self.place, self.kept = self.at, self.learner.keep()


def learn(run: dict[str, Any]) -> tuple[float, float]:
    """Train once; return the loss of held-out text, and the part of all steps that was made."""
    run = {**USUAL, **run}
    count, steps, draw = run["count"], run["steps"], random.Random(run["seed"])
    data = TextDataModule(length=LENGTH, batch_size=run["batch"] * count, seed=run["seed"])
    data.setup("fit")
    loader = data.train_dataloader()
    batches = list(islice((batch for _ in iter(int, 1) for batch in loader), steps))
    fields = {name: run[name] for name in Outer.__dataclass_fields__ if name in run}
    between = steps // (run["kills"] + 1)
    events: dict[int, tuple[str, Island]] = {}
    server = IslandServer("127.0.0.1", 0, KEY)
    server.meeting.expect(count)
    with closing(server), ThreadPoolExecutor(count) as pool:
        islands = [Island(i, run, Outer(**fields), server.port) for i in range(count)]
        list(pool.map(Island.start, islands))
        for kill in range(run["kills"]):
            at = between * (kill + 1) + draw.randrange(between // 2)
            island = draw.choice(islands)
            events[at], events[at + run["away"]] = ("kill", island), ("start", island)
        there = list(islands)
        for turn in range(steps):
            if turn in events:
                what, island = events[turn]
                getattr(island, what)()
                there = [i for i in there if i is not island] + [island] * (what == "start")
            free = [i for i in there if i.answer is None or i.answer.done()]
            for island in free:
                if island.answer is not None:
                    island.answer.result()
                island.step(batches)
            for island in free:
                island.answer = pool.submit(island.exchange)
            while busy := {i.number for i in there if i.answer and not i.answer.done()}:
                if busy <= set(server.meeting.waiting()):
                    break  # for islands that come in a later turn
                time.sleep(0.001)
        made = sum(island.made for island in islands) / steps / count
        ends = [pool.submit(_end, island) for island in there]
        wait(ends)
        for end in ends:
            end.result()
        with torch.no_grad():
            loss = there[0].learner.loss
            found = statistics.fmean(float(loss(batch)) for batch in data.val_dataloader())
    return found, made


def _end(island: Island) -> None:
    if island.answer is not None:
        wait([island.answer])
    island.client.finish(0)
    island.client.leave()


def main() -> None:
    """Train every run once for each seed, and print each as it ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", default=["kills=0", "back=new", "back=own"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    options = parser.parse_args()
    quiet()
    for text in options.runs:
        for seed in options.seeds:
            began = time.process_time()
            found, made = learn({**read_run(text), "seed": seed})
            print(f"{text:<60} seed {seed}  {found:.4f}  {made:.1%} of all steps", flush=True)
            print(f"{time.process_time() - began:.0f} s of the CPU", file=sys.stderr)


if __name__ == "__main__":
    main()
