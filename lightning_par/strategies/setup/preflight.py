"""All checks of a run, in the order in which their messages help most."""

from collections.abc import Iterator
from contextlib import contextmanager

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler

from lightning_par.errors import LightningParError, PlanError
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.processes.mesh_processes import MeshProcesses
from lightning_par.strategies.processes.module_copies import find_copy
from lightning_par.strategies.setup.block_wrapping import check_recomputation
from lightning_par.strategies.setup.checks import check_module, check_trainer, check_whole
from lightning_par.strategies.setup.compiled_blocks import check_compiled
from lightning_par.strategies.setup.memory_check import MemoryCheck
from lightning_par.upstream.lightning import callbacks_of

__all__ = ["check_run", "one_speaks"]


def check_run(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    options: MeshOptions,
    processes: MeshProcesses,
) -> ResolvedPlan:
    """Refuse what cannot work, before the module is changed; return its resolved plan.

    Args:
        trainer: The user's Trainer.
        module: The user's LightningModule, whole; parameters may be on meta.
        options: The options of the strategy.
        processes: The processes of the run.

    Raises:
        LightningParError: The first check that fails, with every problem that it found.
    """
    with one_speaks(processes):
        return _check(trainer, module, options, processes)


@contextmanager
def one_speaks(processes: MeshProcesses) -> Iterator[None]:
    """Surrounds what all ranks refuse alike: of the processes that a script started, the first one
    speaks, and the others end in silence.

    Args:
        processes: The processes of the run.
    """
    try:
        yield
    except LightningParError as error:
        if not processes.speaks:
            raise SystemExit(1) from error  # the first process tells it if it is not found there
        raise


def _check(
    trainer: pl.Trainer, module: pl.LightningModule, options: MeshOptions, processes: MeshProcesses
) -> ResolvedPlan:
    sizes = processes.sizes
    # From what costs least to what costs most, and from the user's options to the model's.
    check_trainer(trainer, module, sizes)
    check_whole(module)
    resolved = check_module(module, options, sizes)
    if sizes.pipeline > 1:
        _check_names(module, resolved)
    accumulates = trainer.accumulate_grad_batches > 1 or any(
        isinstance(callback, GradientAccumulationScheduler)
        and callback.going_to_accumulate_grad_batches()
        for callback in callbacks_of(trainer)
    )
    check_compiled(options, resolved, sizes, processes.device, accumulates=accumulates)
    if sizes.pipeline > 1:
        # From the names of all parameters, which no stage has once the model is cut.
        processes.copy = find_copy(name for name, _ in module.named_parameters())
    memory = MemoryCheck(
        module=module,
        resolved=resolved,
        options=options,
        sizes=sizes,
        precision=trainer.precision,
        ranks_per_host=processes.num_local,
    )
    memory.check(processes.device)
    if options.recomputation is not None:
        num_stages = len(options.place_stages(sizes.pipeline))
        check_recomputation(module, resolved, options.recomputation, num_stages)
    return resolved


def _check_names(module: pl.LightningModule, resolved: ResolvedPlan) -> None:
    """Refuse blocks that are reached by a second name, of which no stage knows that it is one."""
    blocks = {id(module.get_submodule(name)): name for name in resolved.block_names}
    for name, part in module.named_modules(remove_duplicate=False):
        block = blocks.get(id(part), name)
        if block != name:
            raise PlanError(
                "LP203",
                f"{name} and {block} are the same module, but under a pipeline a block must have "
                f"one name only. Turn {name.partition('.')[0]!r} into a property of "
                f"{type(module).__name__}, which registers no second submodule; or use "
                "pipeline_parallel_size=1.",
            )
