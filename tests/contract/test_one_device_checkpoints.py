"""Checkpoints of one device are those of the plain Trainer: each reads what the other wrote, hooks
come in the same order, and what is refused is refused alike.
"""

from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EarlyStopping,
    ModelCheckpoint,
    ModelPruning,
    Timer,
)
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import nn, Tensor

from tests.contract.one_device import (
    compare,
    Diary,
    Idiom,
    loader,
    NAMES,
    outcome,
    Run,
    same_generators,
    saved,
    Tiny,
    trained,
)

pytestmark = pytest.mark.contract
IDIOMS: dict[str, Idiom] = {}


def idiom(function: Idiom) -> Idiom:
    """Add a function to what every strategy is compared in."""
    IDIOMS[function.__name__] = function
    return function


@idiom
def hooks_of_saving_and_resuming(run: Run) -> Any:
    run.fit().save_checkpoint(run.folder / "a.ckpt")
    diary = Diary()
    module = diary.module()
    trainer = run.fit(
        module, callbacks=[diary.callback()], max_epochs=2, ckpt_path=run.folder / "a.ckpt"
    )
    trainer.save_checkpoint(run.folder / "b.ckpt")
    same_generators()
    return [diary.notes, outcome(trainer, module)[-1]]


@idiom
def hooks_of_testing_a_checkpoint(run: Run) -> Any:
    run.fit().save_checkpoint(run.folder / "a.ckpt")
    diary = Diary()
    trainer = run.trainer(callbacks=[diary.callback()])
    found = trainer.test(diary.module(), ckpt_path=run.folder / "a.ckpt", verbose=False)
    return [found, diary.notes]


@idiom
def resuming_where_a_timer_is_over(run: Run) -> Any:
    trainer = run.fit(callbacks=[Timer(timedelta(days=1))])
    trainer.save_checkpoint(run.folder / "a.ckpt")
    timer = Timer(timedelta(microseconds=1))
    resumed = run.fit(callbacks=[timer], max_epochs=9, ckpt_path=run.folder / "a.ckpt")
    same_generators()
    return [trainer.global_step, resumed.global_step]


@idiom
def a_checkpoint_read_before_a_module_is_there(run: Run) -> Any:
    run.fit().save_checkpoint(run.folder / "a.ckpt")
    trainer, module = run.trainer(max_epochs=2), Tiny()
    trainer._checkpoint_connector.resume_start(run.folder / "a.ckpt")
    trainer.strategy.connect(module)
    trainer._checkpoint_connector.resume_start(run.folder / "a.ckpt")
    trainer.fit(module, ckpt_path=run.folder / "a.ckpt")
    return outcome(trainer, module)


@idiom
def a_checkpoint_without_states_of_optimizers(run: Run) -> Any:
    run.fit().save_checkpoint(run.folder / "a.ckpt")
    kept = saved(run.folder / "a.ckpt")
    torch.save({**kept, "optimizer_states": []}, run.folder / "a.ckpt")
    return trained(run, max_epochs=2, ckpt_path=run.folder / "a.ckpt")


@idiom
def best_checkpoints(run: Run) -> Any:
    keep = ModelCheckpoint(run.folder, "{epoch}-{step}", "val", save_top_k=2, save_last=True)
    module = Tiny()
    trainer = run.fit(module, callbacks=[keep], max_epochs=4, enable_checkpointing=True)
    names = sorted(path.name for path in run.folder.glob("*.ckpt"))
    found = trainer.test(module, ckpt_path="best", verbose=False)
    return [names, Path(keep.best_model_path).name, keep.best_model_score, found]


@idiom
def contents_of_a_checkpoint(run: Run) -> Any:
    run.fit(callbacks=[EarlyStopping("val")]).save_checkpoint(run.folder / "a.ckpt")
    found = saved(run.folder / "a.ckpt")
    keys = "state_dict", "optimizer_states", "lr_schedulers", "hyper_parameters", "callbacks"
    return [sorted(found), *(found[key] for key in keys), found["loops"]["fit_loop"]]


@idiom
def weights_only_and_load_from_checkpoint(run: Run) -> Any:
    trainer = run.fit(Tiny(lr=0.01))
    trainer.save_checkpoint(run.folder / "a.ckpt", weights_only=True)
    loaded = Tiny.load_from_checkpoint(run.folder / "a.ckpt", weights_only=False, batch_size=3)
    return [sorted(saved(run.folder / "a.ckpt")), loaded, dict(loaded.hparams)]


@idiom
def resuming_in_two_parts(run: Run) -> Any:
    run.fit(Tiny()).save_checkpoint(run.folder / "a.ckpt")
    module = Tiny()
    module.train_dataloader = loader  # type: ignore[method-assign]
    found = trained(run, module, max_epochs=3, ckpt_path=run.folder / "a.ckpt")
    same_generators()
    return found


class Backwards(Tiny):
    """Its optimizer has the parameters in another order, as groups, and a tensor that is none."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.zeros(2, requires_grad=True)

    def loss(self, batch: Tensor) -> Tensor:
        return ((self.model(batch) - 1 + self.shift) ** 2).mean()

    def configure_optimizers(self) -> Any:
        first, *others = reversed(list(self.parameters()))
        return torch.optim.Adam([{"params": [*others, self.shift]}, {"params": [first], "lr": 0.1}])


@idiom
def optimizers_with_an_order_and_tensors_of_their_own(run: Run) -> Any:
    run.fit(Backwards(), max_epochs=2).save_checkpoint(run.folder / "a.ckpt")
    found = saved(run.folder / "a.ckpt")["optimizer_states"]
    module = Backwards()
    module.train_dataloader = loader  # type: ignore[method-assign]
    resumed = trained(run, module, max_epochs=4, ckpt_path=run.folder / "a.ckpt")
    again = {"max_epochs": 5, "ckpt_path": run.folder / "a.ckpt"}
    plain_too = trained(Run("auto", run.folder), Backwards(), **again)
    same_generators()
    return [found, resumed, plain_too[-1]]


@idiom
def saving_a_connected_module_that_never_ran(run: Run) -> Any:
    trainer, module = run.trainer(), Tiny()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(run.folder / "a.ckpt")
    found = saved(run.folder / "a.ckpt")
    return [sorted(found), found["state_dict"], found["global_step"]]


@idiom
def pruned_weights(run: Run) -> Any:
    pruning = ModelPruning("l1_unstructured", amount=0.5, use_lottery_ticket_hypothesis=False)
    run.fit(callbacks=[pruning], max_epochs=2).save_checkpoint(run.folder / "a.ckpt")
    module = Tiny()
    module.train_dataloader = loader  # type: ignore[method-assign]
    resumed = trained(run, module, max_epochs=3, ckpt_path=run.folder / "a.ckpt")
    same_generators()
    found = saved(run.folder / "a.ckpt")
    return [found["state_dict"], found["optimizer_states"], resumed]


class Freezing(BaseFinetuning):
    """Trains the first layer from the second epoch on."""

    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.model[0])  # type: ignore[index]

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.model[0], optimizer, lr=0.01)


class Unfreezing(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], self.lr)


@idiom
def parameter_groups_that_a_callback_adds(run: Run) -> Any:
    trainer = run.fit(Unfreezing(), callbacks=[Freezing()], max_epochs=2)
    trainer.save_checkpoint(run.folder / "a.ckpt")
    module = Unfreezing()
    module.train_dataloader = loader  # type: ignore[method-assign]
    again: dict[str, Any] = {"max_epochs": 3, "ckpt_path": run.folder / "a.ckpt"}
    resumed = trained(run, module, callbacks=[Freezing()], **again)
    same_generators()
    return [saved(run.folder / "a.ckpt")["optimizer_states"], resumed]


@idiom
def parameters_that_a_callback_adds_although_they_are_there(run: Run) -> Any:
    return trained(run, Tiny(), callbacks=[Freezing()], max_epochs=2)  # and the warning


@idiom
def storage_options_are_refused_like_by_lightning(run: Run) -> Any:
    trainer = run.fit()
    with pytest.raises(TypeError, match="storage_options") as refused:
        trainer.save_checkpoint(run.folder / "a.ckpt", storage_options={"a": 1})
    return [str(refused.value), sorted(path.name for path in run.folder.glob("*.ckpt"))]


class Storing(TorchCheckpointIO):
    """A plugin of the user's."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.calls.append([sorted(checkpoint), Path(path).name, storage_options])
        super().save_checkpoint(checkpoint, path)


@idiom
def another_checkpoint_plugin(run: Run) -> Any:
    plugin = Storing()
    trainer = run.fit(plugins=[plugin])
    trainer.save_checkpoint(run.folder / "a.ckpt", storage_options={"a": 1})
    resumed = run.fit(plugins=[plugin], max_epochs=2, ckpt_path=run.folder / "a.ckpt")
    return [plugin.calls, resumed.global_step]


class Editing(Tiny):
    """Edits checkpoints."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["note"] = {"of": "mine", "tensor": torch.ones(2)}
        checkpoint["state_dict"]["extra"] = torch.zeros(1)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.found = checkpoint["note"], checkpoint["state_dict"].pop("extra")


@idiom
def editing_checkpoints(run: Run) -> Any:
    run.fit(Editing()).save_checkpoint(run.folder / "a.ckpt")
    module = Editing()
    run.fit(module, max_epochs=2, ckpt_path=run.folder / "a.ckpt")
    same_generators()
    return [module.found, sorted(saved(run.folder / "a.ckpt"))]


class Data(pl.LightningDataModule):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def prepare_data(self) -> None:
        self.calls.append("prepare")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)

    def train_dataloader(self) -> Any:
        self.calls.append("train")
        return loader(4)

    def teardown(self, stage: str) -> None:
        self.calls.append(f"end of {stage}")

    def state_dict(self) -> dict[str, Any]:
        return {"calls": len(self.calls)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.calls.append(f"loaded {state_dict['calls']}")


@idiom
def datamodules(run: Run) -> Any:
    data, module = Data(), Tiny()
    trainer = run.trainer(max_epochs=2, reload_dataloaders_every_n_epochs=1)
    trainer.fit(module, datamodule=data)
    trainer.save_checkpoint(run.folder / "a.ckpt")
    again = Data()
    run.trainer(max_epochs=3).fit(Tiny(), datamodule=again, ckpt_path=run.folder / "a.ckpt")
    same_generators()
    return [data.calls, again.calls, outcome(trainer, module)]


@idiom
def frozen_and_shared_weights(run: Run) -> Any:
    module = Tiny()
    module.again = module.model[3]
    module.model[0].requires_grad_(requires_grad=False)
    found = trained(run, module)
    run.fit(module).save_checkpoint(run.folder / "a.ckpt")
    state = saved(run.folder / "a.ckpt")
    return [found, state["state_dict"], state["optimizer_states"]]


@idiom
def weights_that_do_not_fit(run: Run) -> Any:
    run.fit().save_checkpoint(run.folder / "a.ckpt")
    module = Tiny()
    module.more = nn.Linear(1, 1)
    with pytest.raises(RuntimeError, match=r"more\.weight"):
        run.fit(module, ckpt_path=run.folder / "a.ckpt")
    module.strict_loading = False
    run.fit(module, max_epochs=1, limit_train_batches=0)
    return run.trainer().test(module, ckpt_path=run.folder / "a.ckpt", verbose=False)


@idiom
def replaced_writers(run: Run) -> Any:
    """What takes the place of a writer is called, as by tests that count calls."""
    trainer = run.fit()
    with mock.patch("torch.save", wraps=torch.save) as save:
        trainer.save_checkpoint(run.folder / "a.ckpt")
    with mock.patch.object(TorchCheckpointIO, "save_checkpoint") as plugin:
        trainer.save_checkpoint(run.folder / "b.ckpt")
    state = saved(run.folder / "a.ckpt")["state_dict"]
    return [state, save.call_count, plugin.call_args.kwargs, (run.folder / "b.ckpt").exists()]


@pytest.mark.parametrize("strategy", NAMES)
@pytest.mark.parametrize("name", IDIOMS)
def test_one_device_is_the_plain_trainer(
    name: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    compare(IDIOMS[name], strategy, tmp_path)
