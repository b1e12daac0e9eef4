"""The plan of a run: as declared, and what it leaves out inferred from a step on its own data.

The step that is traced is the one of the run: `training_step` of a fit, `validation_step` of
`Trainer.validate`, and so on. Loaders, samples and hooks are the user's code, so all of that
happens in a fork.
"""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any
from weakref import WeakKeyDictionary

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import CombinedLoader, rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn, Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_par.engine.batch import has_entry
from lightning_par.engine.rng import seed_all_generators
from lightning_par.huggingface.lookup import find_model
from lightning_par.inference.examples import runs_of
from lightning_par.inference.forked import ForkError, run_forked
from lightning_par.inference.infer import describe_inferred, infer_here, refuse_all
from lightning_par.inference.lookup import declares_plan, find_plan
from lightning_par.observe.recorder import input_paths, trace_forward
from lightning_par.plan.parallel_plan import BatchLayout, ParallelPlan
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.data.replica_view import as_replica
from lightning_par.upstream.lightning import trainer_of
from lightning_par.upstream.pytree import tree_leaves, tree_map

__all__ = ["first_samples", "lacks_parts", "loaders_of", "plan_of_run"]

_SAMPLES = 2
_STEPS = {
    TrainerFn.FITTING: "training_step",
    TrainerFn.VALIDATING: "validation_step",
    TrainerFn.TESTING: "test_step",
    TrainerFn.PREDICTING: "predict_step",
}
_entries: "WeakKeyDictionary[nn.Module, dict[str, dict[str, str] | None]]" = WeakKeyDictionary()
_known: "WeakKeyDictionary[nn.Module, dict[Any, ParallelPlan]]" = WeakKeyDictionary()


def plan_of_run(
    module: nn.Module, given: ParallelPlan | None, sizes: ParallelSizes
) -> ParallelPlan | None:
    """Return the plan of a run; what it lacks for the mesh is filled in from a trace of the step.

    Args:
        module: The user's module; parameters may be on meta.
        given: The plan of the strategy's options; None: the module's own, if it declares one.
        sizes: Sizes of the mesh.

    Returns:
        None if nothing is declared and nothing needed.
    """
    declared = given if given is not None else find_plan(module)
    if given is None and declared is not None and not declares_plan(module):
        declared = _fitted(module, declared)
    lacks_blocks, lacks_styles = lacks = _lacks(declared, sizes)
    # The trace forks this process and starts loaders, so that it is made for what is missing
    # only.
    if not any(lacks):
        return declared
    plan = declared or ParallelPlan()
    found = _inferred(module, sizes, plan.containers, is_declared=declared is not None)
    if declared is None:
        return found
    taken: dict[str, Any] = {"batch": _filled(plan.batch, found.batch)}
    refusals = dict(plan.refusals)
    if lacks_blocks:
        roles = "first", "last", "replicated"
        declared_names = {unit for role in roles for unit in getattr(plan, role)}
        for role in roles:  # a declared one overrides what was found
            others = (unit for unit in getattr(found, role) if unit not in declared_names)
            taken[role] = *getattr(plan, role), *others
        taken["blocks"] = found.blocks
        refusals |= {k: v for k, v in found.refusals.items() if k == "pipeline"}
    if lacks_styles:
        taken |= {"tensor": found.tensor, "divided": {**found.divided, **plan.divided}}
        refusals |= {k: v for k, v in found.refusals.items() if k == "tensor"}
        # Declared as "none": activations are not to be sharded between the blocks.
        if plan.sequence_region != "none":
            taken["sequence_region"] = found.sequence_region
    return replace(plan, **taken, refusals=refusals)


def _fitted(module: nn.Module, plan: ParallelPlan) -> ParallelPlan:
    """Return the plan derived of a model of transformers, with the entries of the run's batches.

    The model's own names of its inputs are used where the batches have them.
    """
    step = _step_of(module)
    entries = _entries.setdefault(module, {})
    if step not in entries:
        try:
            entries[step] = run_forked(partial(_entries_of, module, plan.batch, step))
        except Exception:  # of a loader, dataset or hook of the user; the run will meet it again
            entries[step] = None
    named = entries[step]
    if named is None:
        # The loader may fail in the fork alone; then the names of the model are the best guess.
        return plan
    layout = plan.batch
    # A batch that is itself the labels has none that are ignored: the model reads them as tokens.
    labels = None if layout.labels is None else named.get(layout.labels) or None
    dims = {named[name]: dim for name, dim in layout.sequence_dims.items() if name in named}
    shift = 0 if labels is None else layout.label_shift
    given: dict[str, Any] = {"sequence_dims": dims, "labels": labels, "label_shift": shift}
    return replace(plan, batch=replace(layout, **given, shifted=None, optional=()))


def _entries_of(module: nn.Module, layout: BatchLayout, step: str) -> dict[str, str] | None:
    """Return which entries of a batch a model of transformers gets, by the names of its arguments;
    None if the batch has the names that the layout has.
    """
    batch = first_samples(module)
    names = {*layout.sequence_dims, layout.labels} - {None, *layout.optional}
    held = find_model(module)
    if held is None or all(has_entry(batch, str(name)) for name in names):
        return None
    found: dict[str, str] = {}
    signature = inspect.signature(held[1].forward)

    def watched(run: Callable[[Any], Any], given: Any) -> Any:
        # By identity: what the model gets unchanged from the batch is an entry of it.
        paths = {id(tensor): path for path, tensor in input_paths(given)}

        def before(_: nn.Module, args: Any, kwargs: Any) -> None:
            arguments = signature.bind_partial(*args, **kwargs).arguments
            found.update({n: paths[id(v)] for n, v in arguments.items() if id(v) in paths})

        handle = held[1].register_forward_pre_hook(before, with_kwargs=True)
        try:
            return run(given)
        finally:
            handle.remove()

    # A step that takes the batch as a whole, or its entries by name: the first that runs will do.
    for run, given in runs_of(module, batch, step):
        with suppress(Exception):  # what the step does with the output is not needed
            trace_forward(module, partial(watched, run), given, _dtype_of_run(module))
        if found:
            break
    return found


def lacks_parts(plan: ParallelPlan | None, sizes: ParallelSizes) -> bool:
    """Whether a declared plan leaves out what the sizes of a mesh need.

    Args:
        plan: None: there is none.
        sizes: Sizes of the mesh.
    """
    return any(_lacks(plan, sizes))


def _lacks(declared: ParallelPlan | None, sizes: ParallelSizes) -> tuple[bool, bool]:
    """Return whether blocks, and whether tensor styles are missing."""
    plan = declared or ParallelPlan()
    return (
        sizes.pipeline > 1 and not plan.containers and "pipeline" not in plan.refusals,
        sizes.tensor > 1 and not plan.tensor and "tensor" not in plan.refusals,
    )


def _filled(declared: BatchLayout, found: BatchLayout) -> BatchLayout:
    """Return a declared layout with the tokens and labels that it leaves out."""
    changes: dict[str, Any] = {}
    if not declared.sequence_dims:
        changes["sequence_dims"] = found.sequence_dims
    if declared.labels is None and declared.loss_weight is None and not declared.label_shift:
        names = ("labels", "ignore_index", "label_shift")
        changes |= {name: getattr(found, name) for name in names}
    return replace(declared, **changes)


def _inferred(
    module: nn.Module, sizes: ParallelSizes, containers: tuple[str, ...], *, is_declared: bool
) -> ParallelPlan:
    """Return the inferred plan of a module for a mesh, and log it once."""
    step = _step_of(module)
    plans = _known.setdefault(module, {})
    # Replicas and context ranks need nothing of the plan that a trace would tell.
    key = (sizes.tensor, sizes.pipeline, containers, _dtype_of_run(module), step)
    of_fit = plans.get((*key[:-1], "training_step"))
    if key not in plans and of_fit is not None and not of_fit.refusals:
        return of_fit
    if key not in plans:
        try:
            plans[key] = run_forked(partial(_infer, module, sizes, containers, step))
        except ForkError as error:
            plans[key] = refuse_all(module, f"{error}.")
        name = type(module).__name__
        lacks = f"the plan of {name} is incomplete" if is_declared else f"{name} declares no plan"
        rank_zero_info(
            f"{lacks}; inferred from its {step}:\n"
            f"{describe_inferred(plans[key], module)}\n"
            "To change this plan, or to skip the inference, return a plan from parallel_plan(). "
            "`lightning-par verify` compares training by this plan with one process."
        )
    return plans[key]


def _step_of(module: nn.Module) -> str:
    """Return the name of the step that a run takes; that of a fit if there is no run."""
    trainer = trainer_of(module) if isinstance(module, pl.LightningModule) else None
    function = None if trainer is None else trainer.state.fn
    return "training_step" if function is None else _STEPS[function]


def _infer(
    module: nn.Module, sizes: ParallelSizes, containers: tuple[str, ...], step: str
) -> ParallelPlan:
    # Every rank infers by itself. A step may choose its layers at random, as with LayerDrop.
    seed_all_generators(0, torch.device("cpu"))
    reason = ""
    try:
        example = first_samples(module, replicas=sizes.data)
    except Exception as error:  # of a loader, dataset or hook of the user
        example, reason = None, f"{type(error).__name__}: {error}"
    return infer_here(
        module,
        example=example,
        step=step,
        without_example=f"the data of the run gave no sample to look at ({reason})",
        tensor_parallel_size=sizes.tensor,
        pipeline_parallel_size=sizes.pipeline,
        blocks=containers,
        dtype=_dtype_of_run(module),
    )


def _dtype_of_run(module: nn.Module) -> torch.dtype | None:
    """Return the dtype to which the precision of a run converts all weights, and in which its steps
    make tensors; None if it converts none, or if 16 bits would replace what is more exact.
    """
    trainer = trainer_of(module) if isinstance(module, pl.LightningModule) else None
    plugin = None if trainer is None else trainer.precision_plugin
    if not isinstance(plugin, DoublePrecision | HalfPrecision):
        return None
    with plugin.tensor_init_context():
        dtype = torch.get_default_dtype()
    # The CPU lacks some functions for numbers of 16 bits, for which weights in float32 stand in.
    is_held = all(p.dtype == dtype for p in module.parameters() if p.is_floating_point())
    return dtype if is_held or isinstance(plugin, DoublePrecision) else None


def first_samples(module: nn.Module, *, replicas: int = 1) -> Any:
    """Return what the step of a run would get: a batch of its first samples, after the hooks.

    Only for a fork of this process (`run_forked`): loaders start, and the Trainer is changed.

    Args:
        module: The user's module, with the Trainer of the run that is being set up.
        replicas: How many there will be, for a step that gathers over them.

    Raises:
        Exception: Whatever loaders, datasets and hooks raise.
    """
    trainer = trainer_of(module) if isinstance(module, pl.LightningModule) else None
    if trainer is None or not isinstance(module, pl.LightningModule):
        raise ValueError("it has no Trainer")
    _stay_alone(trainer, replicas)
    with as_replica(0, replicas):  # loaders that divide themselves ask torch.distributed
        loaders = loaders_of(trainer, module)
        # As they came in, so that the batch has the user's nest of loaders.
        if isinstance(loaders, CombinedLoader):
            loaders = loaders.iterables
        if _step_of(module) != "training_step":  # loaders of an evaluation come one after the other
            loaders = tree_leaves(loaders)[0]
        batch = tree_map(_samples_of, loaders)
    for name in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
        place = [torch.device("cpu")] if name == "transfer_batch_to_device" else []
        batch = getattr(_holder(trainer, module, name), name)(batch, *place, 0)
    return batch


def loaders_of(trainer: pl.Trainer, module: pl.LightningModule) -> Any:
    """Return a nest of the loaders of the run that is being set up, as `first_samples` in a fork.

    `Trainer.train_dataloader` and the like have them only after the strategy is set up.

    Args:
        trainer: The user's Trainer.
        module: The user's module.
    """
    given = getattr(trainer.strategy.launcher, "data", None)
    if given is not None and not isinstance(given, pl.LightningDataModule):
        return given
    phase = _step_of(module).replace("training", "train").replace("validation", "val")
    name = phase.replace("_step", "_dataloader")
    return getattr(_holder(trainer, module, name), name)()


def _holder(trainer: pl.Trainer, module: pl.LightningModule, hook: str) -> Any:
    """Return what holds a hook of the data: the data module, or else the module."""
    datamodule = getattr(trainer, "datamodule", None)
    has_it = datamodule is not None and is_overridden(hook, datamodule)
    return datamodule if has_it else module


def _stay_alone(trainer: pl.Trainer, replicas: int) -> None:
    """Let a Trainer be in the middle of its first step, and reach no other process."""
    strategy: Any = trainer.strategy
    # In a fork, whose files and sockets are those of the parent.
    trainer.loggers = [DummyLogger() for _ in trainer.loggers]
    if trainer.state.fn is not None:
        phases = ("training", "validating", "testing", "predicting")
        setattr(trainer, phases[list(_STEPS).index(trainer.state.fn)], True)

    def all_gather(tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        # [replicas, ...] like torch.distributed's; one process gives the tensor as it is.
        return torch.stack([tensor] * replicas) if replicas > 1 else tensor

    strategy.all_gather = all_gather
    strategy.reduce = lambda tensor, *_, **__: tensor
    strategy.broadcast = lambda obj, *_, **__: obj
    strategy.barrier = lambda *_, **__: None
    strategy.reduce_boolean_decision = lambda decision, *_, **__: decision


def _samples_of(loader: Any) -> Any:
    """Return a batch of the first samples of a loader."""
    if not isinstance(loader, DataLoader):
        return next(iter(loader))
    dataset: Any = loader.dataset
    is_iterable = isinstance(dataset, IterableDataset)
    try:
        if loader.batch_sampler is None:  # `batch_size=None`: the dataset has batches
            # `batch_size=None`: the collate_fn of such a loader takes one entry.
            return loader.collate_fn(next(iter(dataset)) if is_iterable else dataset[0])
        few = range(0 if is_iterable else min(_SAMPLES, len(dataset)))
        return loader.collate_fn([dataset[i] for i in few] or [*islice(dataset, _SAMPLES)])
    except Exception:  # of samples that have other keys than numbers
        # A worker would be a process started by a fork that is about to end.
        loader.num_workers = 0
        return next(iter(loader))
