"""On one device every strategy is the plain Trainer: whatever a script does there, it sees the same
numbers, hooks, warnings and errors, and nothing is left behind.
"""

import collections
import copy
import gc
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from tests.contract.one_device import (
    compare,
    Diary,
    Idiom,
    loader,
    NAMES,
    outcome,
    Run,
    saved,
    Stream,
    Tiny,
    trained,
    Vectors,
)
from tests.support.parity import quiet_trainer

pytestmark = pytest.mark.contract
IDIOMS: dict[str, Idiom] = {}


def idiom(function: Idiom) -> Idiom:
    """Add a function to what every strategy is compared in."""
    IDIOMS[function.__name__] = function
    return function


@idiom
def fit_with_dropout_and_shuffling(run: Run) -> Any:
    return trained(run, Tiny(dropout=0.5), max_epochs=2)


@idiom
def trainer_that_is_pickled_after_a_fit(run: Run) -> Any:
    return pickle.loads(pickle.dumps(run.fit(Tiny()))).global_step


@idiom
def hooks_of_fit(run: Run) -> Any:
    diary = Diary()
    run.fit(diary.module(), callbacks=[diary.callback()], max_epochs=2)
    return diary.notes


@idiom
def hooks_of_evaluation_without_fit(run: Run) -> Any:
    diary = Diary()
    module, trainer = diary.module(), run.trainer(callbacks=[diary.callback()])
    found = [trainer.validate(module, verbose=False), trainer.test(module, verbose=False)]
    return [found, trainer.predict(module), diary.notes]


@idiom
def accumulated_batches_and_an_odd_one(run: Run) -> Any:
    plan: list[Callback] = [GradientAccumulationScheduler({0: 1, 1: 3})]
    first = trained(run, max_epochs=2, accumulate_grad_batches=2)
    return [first, trained(run, max_epochs=3, callbacks=plan)]


@idiom
def clipping(run: Run) -> Any:
    by_norm = trained(run, gradient_clip_val=0.1)
    return [by_norm, trained(run, gradient_clip_val=0.01, gradient_clip_algorithm="value")]


@idiom
def limits_of_batches(run: Run) -> Any:
    found = [trained(run, limit_train_batches=2, limit_val_batches=0.5)]
    found.append(trained(run, limit_train_batches=0.4, limit_val_batches=0))
    return [*found, trained(run, limit_train_batches=0)]


@idiom
def overfit_batches(run: Run) -> Any:
    return trained(run, overfit_batches=1, max_epochs=3)


@idiom
def fast_dev_run_and_barebones(run: Run) -> Any:
    first = trained(run, fast_dev_run=2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, strategy=run.strategy, barebones=True, max_steps=2
    )
    trainer.fit(Tiny())
    return [first, trainer.global_step]


@idiom
def validation_inside_the_epoch(run: Run) -> Any:
    diary = Diary()
    options = {"val_check_interval": 2, "check_val_every_n_epoch": None, "max_epochs": 2}
    run.fit(diary.module(), num_sanity_val_steps=0, **options)
    return [n for n in diary.notes if n.endswith(("validation_start", "train_batch_end"))]


@idiom
def early_stopping(run: Run) -> Any:
    stop = EarlyStopping("val", patience=1, min_delta=10.0)
    found = trained(run, callbacks=[stop], max_epochs=9)
    return [found, stop.stopped_epoch, stop.best_score, stop.wait_count]


@idiom
def should_stop_from_a_hook(run: Run) -> Any:
    def stop(trainer: pl.Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.global_step == 4

    return trained(run, callbacks=[LambdaCallback(on_train_batch_end=stop)], max_epochs=9)


@idiom
def loaders_of_a_connected_module(run: Run) -> Any:
    trainer, module = run.trainer(), Tiny()
    trainer.strategy.connect(module)
    trainer._data_connector.attach_data(module)
    trainer.fit_loop.setup_data()
    return [
        trainer.num_training_batches,
        len(trainer.train_dataloader),
        trainer.estimated_stepping_batches,
    ]


class ByHand(Tiny):
    """Two optimizers, stepped by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.1, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        first, last = self.model[0], self.model[3]
        return torch.optim.SGD(first.parameters(), 0.1), torch.optim.Adam(last.parameters())


@idiom
def manual_optimization(run: Run) -> Any:
    return trained(run, ByHand(), max_epochs=2)


class Searching(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@idiom
def an_optimizer_that_calls_the_closure_often(run: Run) -> Any:
    return trained(run, Searching())


class Plateau(Tiny):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.1)
        reduce = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": reduce, "monitor": "val"}}


@idiom
def schedulers_and_a_logger(run: Run) -> Any:
    logger = CSVLogger(run.folder, "logs")
    monitor: list[Callback] = [LearningRateMonitor("epoch")]
    run.fit(Plateau(), logger=logger, callbacks=monitor, max_epochs=3, log_every_n_steps=1)
    folder = Path(logger.log_dir)
    cells = (folder / "metrics.csv").read_text().replace("\n", ",").split(",")
    numbers = [float(cell) if cell[:1].isdigit() else cell for cell in cells]
    return [numbers, (folder / "hparams.yaml").read_text()]


@idiom
def learning_rate_finder(run: Run) -> Any:
    module = Tiny()
    found = Tuner(run.trainer()).lr_find(module, num_training=12, min_lr=1e-4, max_lr=0.5)
    assert found is not None
    return [found.results, found.suggestion(), module.lr, module]


@idiom
def batch_size_finder(run: Run) -> Any:
    module = Tiny()
    size = Tuner(run.trainer()).scale_batch_size(module, max_trials=2, init_val=1)
    return [size, module.batch_size, module, sorted(p.name for p in run.folder.glob("*.ckpt"))]


class Writer(BasePredictionWriter):
    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.calls: list[Any] = []

    def write_on_batch_end(self, trainer: Any, pl_module: Any, prediction: Any, *rest: Any) -> None:
        self.calls.append([prediction, rest[0]])

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, at: Any) -> None:
        self.calls.append([predictions, at])


@idiom
def predictions(run: Run) -> Any:
    writer = Writer()
    trainer = run.trainer(callbacks=[writer], limit_predict_batches=3)
    found = trainer.predict(Tiny(), [loader(5), loader(2)])
    return [found, writer.calls]


@idiom
def several_loaders(run: Run) -> Any:
    module, trainer = Tiny(), run.trainer()
    both = CombinedLoader({"a": loader(4), "b": loader(6)}, "max_size_cycle")
    module.loss = lambda batch: (
        (
            module.model(  # type: ignore[method-assign]
                batch["a"] if isinstance(batch, dict) else batch
            )
            - 1
        )
        ** 2
    ).mean()
    trainer.fit(module, both, [loader(2), loader(3)])
    return outcome(trainer, module)


@idiom
def streams(run: Run) -> Any:
    module, trainer = Tiny(), run.trainer(max_epochs=2)
    trainer.fit(
        module, torch.utils.data.DataLoader(Stream(), 2), torch.utils.data.DataLoader(Stream())
    )
    return outcome(trainer, module)


class Failing(Tiny):
    error: BaseException = ZeroDivisionError("mine")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise self.error
        return super().training_step(batch, batch_idx)


@idiom
def exceptions_of_a_step(run: Run) -> Any:
    diary = Diary()
    keep = OnExceptionCheckpoint(run.folder, "left")
    trainer = run.trainer(callbacks=[diary.callback(), keep], enable_checkpointing=True)
    with pytest.raises(ZeroDivisionError, match="mine") as caught:
        trainer.fit(diary.module(Failing))
    notes = getattr(caught.value, "__notes__", [])
    return [notes, diary.notes, str(trainer.state), saved(run.folder / "left.ckpt")["global_step"]]


@idiom
def an_interrupt(run: Run) -> Any:
    module, trainer = Failing(), run.trainer()
    module.error = KeyboardInterrupt()
    with pytest.raises((SystemExit, KeyboardInterrupt)) as caught:
        trainer.fit(module)
    return [caught.type.__name__, str(trainer.state), trainer.interrupted]


@idiom
def a_failed_run_and_then_a_good_one(run: Run) -> Any:
    module = Failing()
    with pytest.raises(ZeroDivisionError):
        run.fit(module)
    return trained(run, module, limit_train_batches=1)


@idiom
def wrong_outputs_of_a_step(run: Run) -> Any:
    found = []
    for value in (5.0, {"a": 5}, "text"):
        module = Tiny()
        module.training_step = lambda *_, value=value: value  # type: ignore[method-assign]
        with pytest.raises(Exception, match=r"loss|Tensor") as caught:
            run.fit(module)
        found.append([caught.type.__name__, str(caught.value)])
    return found


@idiom
def steps_that_are_left_out(run: Run) -> Any:
    module = Tiny()
    step = module.training_step

    def some(batch: Any, batch_idx: int) -> Any:
        return None if batch_idx else step(batch, batch_idx)

    module.training_step = some  # type: ignore[method-assign]
    return trained(run, module)


class Knowing(Callback):
    """Knows its Trainer, and is copied with it in the middle of a run."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self.trainer, self.copies = trainer, 0

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.copies += copy.deepcopy(self).trainer is not trainer


@idiom
def deep_copies(run: Run) -> Any:
    callback = Knowing()
    trainer = run.fit(callbacks=[callback])
    again = copy.deepcopy(trainer)
    again.fit_loop.max_epochs = 2
    module = Tiny()
    again.fit(module)
    return [callback.copies, outcome(again, module), copy.deepcopy(module)]


@idiom
def averaged_weights(run: Run) -> Any:
    swa = trained(run, max_epochs=3, callbacks=[StochasticWeightAveraging(0.01, 1)])
    return [swa, trained(run, max_epochs=2, callbacks=[EMAWeightAveraging()])]


class Meeting(Tiny):
    """Asks the strategy for what only several processes need."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        strategy = self.trainer.strategy
        strategy.barrier()
        self.seen = [
            self.all_gather(batch),
            strategy.broadcast(["x"]),
            strategy.reduce(torch.tensor(3.0), reduce_op="mean"),
            strategy.reduce_boolean_decision(False),
            [self.trainer.world_size, self.global_rank, self.local_rank, str(self.device)],
            self.trainer.is_global_zero,
        ]
        self.log("synced", batch.sum(), sync_dist=True)
        return super().training_step(batch, batch_idx)


@idiom
def collectives_of_one(run: Run) -> Any:
    module = Meeting()
    return [trained(run, module), module.seen]


class Measuring(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.error = torchmetrics.MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.error.update(self.model(batch), torch.ones(len(batch), 2))
        self.log("error", self.error, prog_bar=True)
        self.log_dict({"sum": batch.sum(), "max": batch.max()}, reduce_fx="max")


@idiom
def metrics(run: Run) -> Any:
    module = Measuring()
    trainer = run.fit(module, max_epochs=2, callbacks=[Copying()])
    return [outcome(trainer, module), trainer.logged_metrics, trainer.progress_bar_metrics]


class Copying(Callback):
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        copy.deepcopy(pl_module)


class Reading(Callback):
    """Keeps a copy of the checkpoint that a run goes on from."""

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self.kept = copy.deepcopy(checkpoint)


@idiom
def copies_of_a_loaded_checkpoint(run: Run) -> Any:
    first, callback = run.fit(), Reading()
    first.save_checkpoint(run.folder / "first.ckpt")
    again = trained(run, ckpt_path=run.folder / "first.ckpt", max_epochs=2, callbacks=[callback])
    return [again, dict(callback.kept["state_dict"]), callback.kept["global_step"]]


class Silent(Tiny):
    """Logs nothing, as nobody listens after a run."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


@idiom
def a_step_after_the_run(run: Run) -> Any:
    module = Silent()
    trainer = run.fit(module)
    loop = trainer.fit_loop.epoch_loop.automatic_optimization
    kwargs = {"batch": Vectors().rows[:2], "batch_idx": 0}
    loop.run(trainer.optimizers[0], 0, collections.OrderedDict(kwargs))
    return outcome(trainer, module)


@idiom
def one_trainer_many_runs(run: Run) -> Any:
    module, trainer = Tiny(), run.trainer()
    trainer.fit(module)
    found = [trainer.test(module, verbose=False), trainer.validate(module, verbose=False)]
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    other = Tiny()
    found.append(trainer.predict(other))
    return [found, outcome(trainer, module)]


@idiom
def inside_an_allocation_of_slurm_without_srun(run: Run) -> Any:
    given = {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "7"}
    with mock.patch.dict(os.environ, given):
        trainer, module = run.trainer(), Tiny()
        trainer.fit(module)
        place = trainer.global_rank, trainer.world_size, trainer.strategy.is_global_zero
        return place, outcome(trainer, module)


@idiom
def precisions(run: Run) -> Any:
    return [trained(run, precision=precision) for precision in ("64-true", "bf16-mixed")]


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("name", IDIOMS)
def test_one_device_is_the_plain_trainer(
    name: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    compare(IDIOMS[name], strategy, tmp_path)


class Collecting(Vectors):
    """Collects garbage in its worker, as Python may do at any time."""

    def __getitem__(self, index: int) -> torch.Tensor:
        gc.collect()
        return super().__getitem__(index)


def test_workers_of_a_later_run_do_not_end_the_groups_of_an_earlier_one() -> None:
    """They inherit them as garbage, but not their threads."""
    gc.disable()
    try:
        for _ in range(2):
            trainer = quiet_trainer(strategy="hybrid3d", devices=1, max_epochs=1)
            trainer.fit(Tiny(), DataLoader(Collecting(), 2, num_workers=1))
    finally:
        gc.enable()
