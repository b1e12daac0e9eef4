"""A server that dies, islands that die, and an island that is slower than the others.

    python benchmarks/islands_faults.py [server] [islands] [away] [slow] [--seeds 0 1 2]

Islands of one process each train the same tiny GPT on the sources of Python's standard library,
started by ``lightning-par fit``. Each sleeps in every step, much longer than it computes, so that a
few cores are no limit for all of them together.

- server: ``lightning-par serve`` is killed five times at random moments, and started again. The
  weights at the end are compared, bit for bit, with those of a run in which nothing was killed.
- islands: of ``lightning-par fit --islands 4 --restarts 10``, a random island is killed ten times,
  each time once the last one is back. The loss of held-out text at the end beside that of a run in
  which nothing was killed, for each seed, and the longest time in which no island ended a step.
- away: the same, but an island that was killed is started again only a minute later. The runs of
  all seeds go on beside each other.
- slow: one island of four sleeps three times as long. Steps a second of all, from the first
  exchange of the last to the last step of the first, over the sum of what each makes alone.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from _learn import quiet
from lightning.pytorch.callbacks import Callback

from lightning_par.engine.data.islands.environment import ISLAND_VARIABLE, SERVER_VARIABLE
from lightning_par.engine.data.islands.weights import load_weights, SharedWeights
from lightning_par.models import GPTModule, TextDataModule

ROOT = Path(__file__).resolve().parents[1]
COUNT, KILLS, SERVER_KILLS = 4, 10, 5
SIZES = {"model_dim": 64, "num_layers": 3}
TEXT: dict[str, Any] = {"length": 64, "batch_size": 8}


class Pace(Callback):
    """Sleeps in every step; notes in a file of its process when each ended, and the exchanges.

    Args:
        seconds: That each island sleeps, by its number.
    """

    def __init__(self, seconds: list[float]) -> None:
        island = int(os.environ[ISLAND_VARIABLE].partition("/")[0])
        self.seconds = seconds[island]
        self.notes = Path("logs", f"{island}-{os.getpid()}").absolute()

    def on_train_batch_start(self, *_: Any) -> None:
        """Be slow."""
        time.sleep(self.seconds)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Note the time, and how many exchanges were made."""
        with self.notes.open("a") as notes:
            notes.write(f"{time.monotonic()} {len(trainer.strategy.islands.exchanges)}\n")


class Run:
    """A run in a folder of its own, and what its islands noted.

    Args:
        folder: Is made.
        seconds: That each island sleeps in a step.
        steps: `max_steps`.
        seed: Of the weights and of the order of the samples.
        **outer: Fields of `Outer`.
    """

    def __init__(
        self, folder: Path, seconds: Sequence[float], steps: int, seed: int, **outer: Any
    ) -> None:
        self.folder = folder
        (folder / "logs").mkdir(parents=True)
        outer = {"every": 20, "optimizer": "average", **outer}
        strategy = {"class_path": "lightning_par.Hybrid3DStrategy", "init_args": {"outer": outer}}
        model = {"overrides": SIZES, "lr": 3e-3, "max_steps": steps, "warmup_steps": 50}
        quietly = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        pace = {"class_path": "islands_faults.Pace", "init_args": {"seconds": list(seconds)}}
        trainer = {
            **dict.fromkeys(quietly, False),
            "accelerator": "cpu",
            "devices": 1,
            "max_steps": steps,
            "limit_val_batches": 0,
            "gradient_clip_val": 1.0,
            "strategy": strategy,
            "callbacks": [pace],
        }
        config = {
            "seed_everything": seed,
            "trainer": trainer,
            "model": {"class_path": "lightning_par.models.GPTModule", "init_args": model},
            "data": {
                "class_path": "lightning_par.models.TextDataModule",
                "init_args": {**TEXT, "seed": seed},
            },
        }
        (folder / "run.yaml").write_text(json.dumps(config))  # which is YAML, too

    @contextmanager
    def start(self, *words: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
        """Start ``lightning-par`` with these words; it is ended at the end if it still runs."""
        here = os.environ.get("PYTHONPATH", "")
        told = {
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), here]),
            "OMP_NUM_THREADS": "1",
            "LIGHTNING_PAR_KEY": "a key of the benchmark only",
        }
        with (self.folder / "said").open("a") as said:
            process = subprocess.Popen(
                [sys.executable, "-m", "lightning_par.cli", *words],
                cwd=self.folder,
                env={**os.environ, **told, **variables},
                stdout=subprocess.PIPE if words[0] == "serve" else said,
                stderr=said,
                text=True,
            )
        try:
            yield process
        finally:
            process.terminate()
            process.communicate()

    def islands(self, count: int, restarts: int = 0) -> Any:
        """Start islands and their server by one command."""
        words = [f"--islands={count}", f"--restarts={restarts}", "--state=state"]
        return self.start("fit", *words, "--config=run.yaml")

    def wait(self, *processes: subprocess.Popen[str]) -> None:
        """Wait for processes; give up with what they said if one has failed."""
        codes = [process.wait() for process in processes]
        if any(codes):
            sys.exit((self.folder / "said").read_text())

    def training(self) -> list[int]:
        """Return the processes that have made a step and still run."""
        logs = (log for log in (self.folder / "logs").iterdir() if log.stat().st_size)
        found = [int(log.name.partition("-")[2]) for log in logs]
        return sorted(pid for pid in found if Path(f"/proc/{pid}").exists())

    def noted(self) -> list[list[tuple[float, int]]]:
        """Return for each process the times at which its steps ended, and its exchanges then."""
        texts = [log.read_text().split() for log in (self.folder / "logs").iterdir()]
        return [
            [(float(t), int(n)) for t, n in zip(text[::2], text[1::2], strict=False)]
            for text in texts
            if text
        ]

    def weights(self) -> SharedWeights:
        """Return what the server has saved."""
        found = load_weights(self.folder / "state")
        assert found is not None
        return found

    def loss(self, seed: int) -> float:
        """Return the loss of held-out text, in nats, of the weights that all islands share."""
        module = GPTModule(overrides=SIZES)
        module.configure_model()
        weights = dict(module.named_parameters())
        shown = self.weights().shown
        assert weights.keys() == shown.keys()
        data = TextDataModule(**TEXT, seed=seed)
        data.setup("fit")
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(shown[name])
            found = []
            for batch in data.val_dataloader():
                logits = module.model(batch["input_ids"])
                found.append(F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
        return float(torch.stack(found).mean())


def server(folder: Path, seeds: list[int]) -> None:
    """Kill the server again and again."""
    steps, lock_step = 400, {"min_islands": COUNT}
    calm = Run(folder / "calm", [0] * COUNT, steps, seeds[0], **lock_step)
    with calm.islands(COUNT) as process:
        calm.wait(process)
    run = Run(folder / "killed", [0.2] * COUNT, steps, seeds[0], **lock_step)
    seeded = random.Random(seeds[0])
    with ExitStack() as stack:
        port, islands = "0", []
        for kill in range(SERVER_KILLS + 1):
            with run.start("serve", f"--port={port}", "--state=state") as process:
                assert process.stdout is not None
                port = process.stdout.readline().rpartition(":")[2].strip()
                for island in range(COUNT if kill == 0 else 0):
                    place = {ISLAND_VARIABLE: f"{island}/{COUNT}"}
                    place |= {SERVER_VARIABLE: f"127.0.0.1:{port}"}
                    island_run = run.start("fit", "--config=run.yaml", **place)
                    islands.append(stack.enter_context(island_run))
                if kill == SERVER_KILLS:
                    run.wait(*islands)
                    break
                while len(run.training()) < COUNT:
                    time.sleep(0.1)
                time.sleep(seeded.uniform(1, 10))
                ended = [each.poll() for each in islands]
                assert ended == [None] * COUNT, "a longer run is needed"
                process.kill()
    found, wanted = run.weights(), calm.weights()
    same = all(torch.equal(found.shown[name], wanted.shown[name]) for name in wanted.shown)
    rounds = [each.fragments[0].version for each in (found, wanted)]
    lost = "equal to the bit" if same else "not equal"
    print(f"server killed {SERVER_KILLS} times: {rounds[0]} rounds of {rounds[1]}, weights {lost}")


def islands(folder: Path, seeds: list[int]) -> None:
    """Kill islands again and again."""
    steps, options = 1000, {"min_islands": 2, "grace": 2, "keep": "kept"}
    for seed in seeds:
        for kills in (0, KILLS):
            # The losses of those that live on do not depend on how long they sleep.
            seconds = 0.6 if kills else 0.0
            run = Run(folder / f"{seed}-{kills}", [seconds] * COUNT, steps, seed, **options)
            with run.islands(COUNT, restarts=kills) as process:
                done = _kill(run, process, kills, random.Random(seed))
                run.wait(process)
            _print_run(run, seed, done, steps)


def _print_run(run: Run, seed: int, kills: int, steps: int) -> None:
    """Print how many steps were made, the loss, and the longest times without a step."""
    times = sorted(at for log in run.noted() for at, _ in log)
    part = len(times) / COUNT / steps
    print(f"seed {seed}, {kills} kills: {part:.1%} of all steps, loss {run.loss(seed):.4f}")
    pauses = sorted(((after - at, at) for at, after in pairwise(times)), reverse=True)
    found = [f"{pause:.1f} s at {at - times[0]:.0f} s" for pause, at in pauses[:3]]
    print(f"    without a step for {', '.join(found)} of {times[-1] - times[0]:.0f} s", flush=True)


def _kill(run: Run, process: subprocess.Popen[str], kills: int, seeded: random.Random) -> int:
    """Kill a random island, so often; return how often there was one."""
    for done in range(kills):
        while len(there := run.training()) < COUNT:
            if process.poll() is not None:
                return done
            time.sleep(0.1)
        time.sleep(seeded.uniform(0, 10))
        killed = seeded.choice(there)
        os.kill(killed, signal.SIGKILL)
        while killed in run.training():  # until its parent has seen it
            time.sleep(0.05)
    return kills


def away(folder: Path, seeds: list[int]) -> None:
    """Kill islands again and again, and let each be away for a minute."""
    steps, options = 4000, {"min_islands": 2, "grace": 2, "keep": "kept"}
    for seed in seeds:
        calm = Run(folder / f"{seed}-calm", [0.0] * COUNT, steps, seed, **options)
        with calm.islands(COUNT) as process:
            calm.wait(process)
        print(f"seed {seed}, no kills: loss {calm.loss(seed):.4f}", flush=True)
    runs = [Run(folder / str(seed), [0.6] * COUNT, steps, seed, **options) for seed in seeds]
    with ThreadPoolExecutor(len(runs)) as pool:
        list(pool.map(_send_away, runs, seeds))
    for seed, run in zip(seeds, runs, strict=True):
        _print_run(run, seed, KILLS, steps)


def _send_away(run: Run, seed: int) -> None:
    """Train, and kill a random island so often; start it again a minute later."""
    seeded = random.Random(seed)
    with run.start("serve", "--port=0", "--state=state") as serving, ExitStack() as stack:
        assert serving.stdout is not None
        port = serving.stdout.readline().rpartition(":")[2].strip()

        def begin(island: int) -> subprocess.Popen[str]:
            place = {ISLAND_VARIABLE: f"{island}/{COUNT}", SERVER_VARIABLE: f"127.0.0.1:{port}"}
            return stack.enter_context(run.start("fit", "--config=run.yaml", **place))

        there = [begin(island) for island in range(COUNT)]
        for _ in range(KILLS):
            while len(run.training()) < COUNT:
                time.sleep(0.1)
            time.sleep(seeded.uniform(0, 10))
            island = seeded.randrange(COUNT)
            assert [each.poll() for each in there] == [None] * COUNT, "a longer run is needed"
            there[island].kill()
            there[island].wait()
            time.sleep(60)
            there[island] = begin(island)
        run.wait(*there)


def slow(folder: Path, seeds: list[int]) -> None:
    """Let one island be slow."""
    rates = [
        _rate(Run(folder / f"alone-{seconds:g}", [seconds], 30, seeds[0], every=5), 1)
        for seconds in (1.0, 3.0)
    ]
    alone = (COUNT - 1) * rates[0] + rates[1]
    print(f"alone: {rates[0]:.3f} and {rates[1]:.3f} steps a second, all together {alone:.3f}")
    ways: dict[str, dict[str, Any]] = {
        "in lock step": {"min_islands": COUNT},
        "adapt=True": {"adapt": True, "min_islands": COUNT},
        "grace=0": {"grace": 0},
    }
    for name, options in ways.items():
        seconds = [1.0] * (COUNT - 1) + [3.0]
        run = Run(folder / name, seconds, 60, seeds[0], every=10, **options)
        rate = _rate(run, COUNT)
        print(f"{name:<14} {rate:.3f} steps a second, {rate / alone:.3f} of alone", flush=True)


def _rate(run: Run, count: int) -> float:
    """Return the steps of all in a second, while all are there."""
    with run.islands(count) as process:
        run.wait(process)
    logs = run.noted()
    begin = max(next(at for at, exchanges in log if exchanges) for log in logs)
    end = min(log[-1][0] for log in logs)
    return sum(begin < at <= end for log in logs for at, _ in log) / (end - begin)


PARTS = {"server": server, "islands": islands, "away": away, "slow": slow}


def main() -> None:
    """Run what was chosen, and print what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    chosen = parser.parse_args()
    quiet()
    for part in chosen.parts:
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            PARTS[part](Path(folder), chosen.seeds)
        print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
