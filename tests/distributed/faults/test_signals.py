"""A signal in the middle of a step: checkpoints are whole, and every rank stops after one batch."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from torch import Tensor

import lightning_par
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.parity import quiet_trainer, TOLERANCE
from tests.support.ranks.api import run_ranks

REQUEUE = signal.SIGUSR2  # ranks of tests print their stacks at SIGUSR1
STEPS = 25
AT = 3
"""The step, counted from 1, in whose middle the signal comes."""


class HalfwaySGD(torch.optim.SGD):
    """Updates half of the parameters, gets a signal if there is one, and updates the others."""

    signal: int | None = None

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        groups = self.param_groups
        for group in groups:
            self.param_groups = [group]
            super().step()
            self.param_groups = groups
            if group is groups[0]:
                self.send()
        return loss

    @classmethod
    def send(cls) -> None:
        number, cls.signal = cls.signal, None
        if number is not None:
            os.kill(os.getpid(), number)


class Module(ToyModule):
    """Gets a signal in one of its steps.

    Args:
        answer: Exists once the signal has been answered, if it does not end the run.
    """

    signal: int | None = None

    def __init__(self, answer: Path) -> None:
        super().__init__()
        self.answer = answer
        self.batches = 0

    def wait_for_answer(self) -> None:
        """Take long for a batch until the signal is answered: ranks look for signals of others
        five times a second, and a busy machine may let them wait.
        """
        self.batches += 1
        if self.batches >= AT and not self.answer.exists():
            time.sleep(0.2)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        halves = [{"params": parameters[::2]}, {"params": parameters[1::2]}]
        return HalfwaySGD(halves, lr=0.1, momentum=0.9)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == AT - 1 and self.signal is not None:
            HalfwaySGD.signal, self.signal = self.signal, None
        self.wait_for_answer()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == AT and self.signal is not None:
            os.kill(os.getpid(), self.signal)
        self.wait_for_answer()
        super().validation_step(batch, batch_idx)


class History(Callback):
    """Keeps the weights after every step of one process, and counts batches."""

    def __init__(self, keeps: bool) -> None:
        self.keeps, self.batches = keeps, 0
        self.weights: dict[int, dict[str, Tensor]] = {}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.batches += 1
        if self.keeps:
            state = pl_module.state_dict()
            self.weights[trainer.global_step] = {k: v.clone() for k, v in state.items()}

    def on_validation_batch_end(self, *_: Any) -> None:
        self.batches += 1


def batches(accumulated: int, replicas: int = 1) -> Any:
    """Give the same global batches to any number of replicas."""
    samples = ToyData(4 * STEPS * accumulated)
    return loader(samples, 4 // replicas)


@cache
def undisturbed(accumulated: int) -> dict[int, dict[str, Tensor]]:
    """Give the weights of one process after every step."""
    history = History(keeps=True)
    trainer = quiet_trainer(
        devices=1,
        max_steps=STEPS,
        accumulate_grad_batches=accumulated,
        limit_val_batches=0,
        callbacks=[history],
    )
    torch.set_default_dtype(torch.float64)
    try:
        data = batches(accumulated)
        trainer.fit(Module(Path.cwd()), data, data)
    finally:
        torch.set_default_dtype(torch.float32)
    return history.weights


def variables(rank: int, world: int, folder: Path) -> dict[str, str]:
    """Give what SLURM tells a task."""
    return {
        "SLURM_JOB_ID": "77",
        "SLURM_NTASKS": str(world),
        "SLURM_NTASKS_PER_NODE": str(world),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "PATH": f"{folder}:{os.environ['PATH']}",
    }


def run(
    rank: int,
    world: int,
    folder: Path,
    number: int,
    receivers: Sequence[int],
    accumulated: int = 1,
    evaluates: bool = False,
    **sizes: int,
) -> dict[str, Any]:
    """Train, or validate, under SLURM; the signal comes to some ranks."""
    torch.set_default_dtype(torch.float64)
    module = Module(folder / "calls")
    module.signal = number if rank in receivers else None
    history, before = History(keeps=False), signal.getsignal(number)
    with mock.patch.dict(os.environ, variables(rank, world, folder)):
        trainer = quiet_trainer(
            devices=world,
            strategy=lightning_par.Hybrid3DStrategy(**sizes),  # type: ignore[arg-type]
            plugins=[SLURMEnvironment(requeue_signal=REQUEUE)],
            max_steps=STEPS,
            accumulate_grad_batches=accumulated,
            limit_val_batches=None if evaluates else 0,
            enable_checkpointing=True,
            default_root_dir=folder,
            callbacks=[
                history,
                ModelCheckpoint(
                    folder / "saved", filename="stopped", save_on_exception=True, save_top_k=0
                ),
            ],
        )
        data = batches(accumulated, sizes.get("data_parallel_size", 1))
        ended = False
        try:
            if evaluates:
                trainer.validate(module, data)
            else:
                trainer.fit(module, data, data)
        except SystemExit:
            ended = True
    return {
        "batches": history.batches,
        "ended": ended,
        "steps": trainer.global_step,
        "handler": signal.getsignal(number) == before,
        "threads": [t.name for t in threading.enumerate() if "signal" in t.name],
        "callbacks": [type(c).__name__ for c in trainer.callbacks],  # type: ignore[attr-defined]
    }


def _install_scontrol(folder: Path) -> Path:
    """Put a `scontrol` into `folder` that notes how it was called."""
    calls, script = folder / "calls", folder / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\n')
    script.chmod(0o755)
    return calls


def assert_whole(path: Path, accumulated: int = 1) -> int:
    """The checkpoint holds what one process has after the step that it names; return that one."""
    saved = torch.load(path, weights_only=True)
    expected = undisturbed(accumulated)[saved["global_step"]]
    for name, weight in saved["state_dict"].items():
        torch.testing.assert_close(weight, expected[name].cpu(), rtol=TOLERANCE, atol=TOLERANCE)
    return int(saved["global_step"])


TENSOR = {"tensor_parallel_size": 2}
PIPELINE = {"pipeline_parallel_size": 2}
ZERO = {"data_parallel_size": 2, "zero_stage": 3}


@pytest.mark.parametrize(
    ("sizes", "receivers", "accumulated"),
    [
        pytest.param(TENSOR, (1,), 1, id="tp2, rank 1"),
        pytest.param(PIPELINE, (0, 1), 1, id="pp2, both"),
        pytest.param(ZERO, (0,), 2, id="zero3, rank 0, accumulated"),
    ],
)
def test_requeued_job_saves_a_whole_step_once(
    sizes: dict[str, int], receivers: tuple[int, ...], accumulated: int, tmp_path: Path
) -> None:
    calls = _install_scontrol(tmp_path)
    results = run_ranks(run, 2, tmp_path, REQUEUE, receivers, accumulated, **sizes)
    assert AT <= assert_whole(tmp_path / "hpc_ckpt_1.ckpt", accumulated) < STEPS
    assert calls.read_text() == "requeue 77\n"
    assert str((tmp_path / "saved" / "last-requeue.ckpt").readlink()) == "../hpc_ckpt_1.ckpt"
    assert [r["steps"] for r in results] == [STEPS] * 2, "trains on until SLURM ends it"
    assert all(r["handler"] and not r["threads"] and not r["ended"] for r in results)
    assert all(r["callbacks"][0] == "History" and len(r["callbacks"]) == 2 for r in results)


def test_one_device_saves_a_whole_step(tmp_path: Path) -> None:
    calls = _install_scontrol(tmp_path)
    (result,) = run_ranks(run, 1, tmp_path, REQUEUE, (0,))
    assert assert_whole(tmp_path / "hpc_ckpt_1.ckpt") == AT
    assert calls.read_text() == "requeue 77\n"
    assert result["handler"]
    assert result["callbacks"] == ["History", "ModelCheckpoint"]


def test_terminated_training_ends_on_every_rank_after_one_step(tmp_path: Path) -> None:
    results = run_ranks(run, 2, tmp_path, signal.SIGTERM, (1,), fresh=True, **TENSOR)
    assert all(r["ended"] and r["handler"] and not r["threads"] for r in results)
    saved = assert_whole(tmp_path / "saved" / "stopped.ckpt")
    assert [r["steps"] for r in results] == [saved] * 2
    assert AT <= saved < STEPS


def test_terminated_validation_ends_on_every_rank_after_one_batch(tmp_path: Path) -> None:
    results = run_ranks(
        run, 2, tmp_path, signal.SIGTERM, (1,), evaluates=True, fresh=True, **TENSOR
    )
    assert all(r["ended"] and r["handler"] for r in results)
    assert AT < results[0]["batches"] == results[1]["batches"] < STEPS


class Early(Callback):
    """Ends one rank before its first batch.

    Args:
        hook: Where.
    """

    def __init__(self, hook: str) -> None:
        if int(os.environ["LOCAL_RANK"]) == 1:
            setattr(self, hook, self.terminate)

    def terminate(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)


def terminate_early(rank: int, world: int, hook: str) -> bool:
    strategy = lightning_par.Hybrid3DStrategy(tensor_parallel_size=2, pipeline_parallel_size=1)
    trainer = quiet_trainer(
        devices=2,
        strategy=strategy,
        max_steps=STEPS,
        callbacks=[Early(hook)],
        num_sanity_val_steps=1,
    )
    data = batches(1)
    try:
        trainer.fit(ToyModule(), data, data)
    except SystemExit:
        return trainer.global_step < STEPS
    return False


@pytest.mark.parametrize("hook", ["on_sanity_check_start", "on_validation_start", "on_train_start"])
def test_terminated_before_its_first_batch_ends_on_every_rank(hook: str) -> None:
    """Lightning's handler broadcasts, and must not while the other ranks are elsewhere."""
    assert run_ranks(terminate_early, 2, hook, fresh=True) == [True, True]
