"""The plan of a module that declares none, inferred from a first batch of its data."""

from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_par.engine.rng import fork_all_rng
from lightning_par.engine.tensor_tree import map_tensors
from lightning_par.plan.inference.infer import describe_inferred, infer_plan
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.step.look.silence import silent
from lightning_par.upstream.lightning import trainer_of

__all__ = ["first_samples", "infer_for_run", "train_loader"]

_SAMPLES = 2
_known: "WeakKeyDictionary[nn.Module, dict[Any, ParallelPlan]]" = WeakKeyDictionary()


def infer_for_run(module: nn.Module, sizes: ParallelSizes) -> ParallelPlan:
    """Return the inferred plan of a module for a mesh, and log it once.

    Args:
        module: The user's module; parameters may be on meta.
        sizes: Sizes of the mesh.
    """
    example = first_samples(module)
    plans = _known.setdefault(module, {})
    key = (sizes.tensor, sizes.pipeline, True)  # of a training step
    if key not in plans and example is None:
        key = (*key[:2], False)
    if key not in plans:
        trainer = trainer_of(module) if isinstance(module, pl.LightningModule) else None
        with silent(trainer.loggers if trainer is not None else ()):
            plans[key] = infer_plan(
                module,
                example=example,
                tensor_parallel_size=sizes.tensor,
                pipeline_parallel_size=sizes.pipeline,
            )
        rank_zero_info(
            f"{type(module).__name__} declares no parallel_plan(); inferred from its structure:\n"
            f"{describe_inferred(plans[key])}\n"
            "Return it from a parallel_plan() to change it or to skip this; "
            "`lightning-par verify` proves it."
        )
    return plans[key]


def train_loader(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    """Return what gives the training batches of a fit that is being set up, or None.

    `Trainer.train_dataloader` has it only after the strategy is set up.
    """
    given = getattr(trainer.strategy.launcher, "train_data", None)
    if given is not None and not isinstance(given, pl.LightningDataModule):
        return given
    datamodule: pl.LightningDataModule | None = getattr(trainer, "datamodule", None)
    source = module if datamodule is None else datamodule
    return source.train_dataloader() if is_overridden("train_dataloader", source) else None


def first_samples(module: nn.Module) -> Any:
    """Return a batch of the first samples of the training data; None if there are none to see.

    The samples are taken from the dataset, so no loader starts, and no random state moves.
    """
    trainer = trainer_of(module) if isinstance(module, pl.LightningModule) else None
    if trainer is None or not isinstance(module, pl.LightningModule):
        return None
    with fork_all_rng(torch.device("cpu")):
        try:
            loader = train_loader(trainer, module)
            if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
                return None
            dataset: Any = loader.dataset
            if loader.batch_sampler is None:  # `batch_size=None`: the dataset has batches
                batch = loader.collate_fn(dataset[0])
            else:
                batch = loader.collate_fn([dataset[i] for i in range(min(_SAMPLES, len(dataset)))])
            # As a precision plugin does it, which converts the module later.
            kind = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
            return map_tensors(batch, lambda t: t.to(kind) if t.is_floating_point() else t)
        except Exception:  # of a loader or dataset of the user; the run will meet it again
            return None
