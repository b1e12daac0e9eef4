"""A configured run as `search` and `forecast` see it: model, batch and layout."""

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lightning_par.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_par.commands import takes_file
from lightning_par.commands.run_config import configure, ConfiguredRun
from lightning_par.commands.verify import first_batches
from lightning_par.engine.init.deferred_init import record_construction
from lightning_par.errors import LightningParError
from lightning_par.plan.inference.infer import infer_plan
from lightning_par.plan.inference.tracing import input_paths
from lightning_par.plan.lookup import find_plan
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.planner.block_trace import shape_of
from lightning_par.planner.model_shape import read_shape
from lightning_par.planner.profiles import implementation, load_profile
from lightning_par.planner.search import Planner
from lightning_par.planner.shapes import Layout, TransformerShape
from lightning_par.profiling.picture_file import check_picture_path
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.setup.checks import check_module

__all__ = ["PlannedRun", "add_machine_options", "read_run"]


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run on a machine that need not be here.

    Attributes:
        planner: Of its model, on the asked device.
        nodes: Of the Trainer.
        devices: Of each node.
        batch_size: Samples of a replica's batch, as the data module makes them.
        accumulated: Batches of an optimizer step.
        options: Of its strategy.
        recompute: What its callbacks recompute.
        accepts: Of a mesh with a ZeRO stage, whether the model can be put on it.
    """

    planner: Planner
    nodes: int
    devices: int
    batch_size: int
    accumulated: int
    options: MeshOptions
    recompute: Any
    accepts: Callable[[ParallelSizes, int], bool]

    def sizes(self) -> ParallelSizes:
        """Return the mesh that the configuration asks for.

        Raises:
            MeshError: The sizes do not fit the devices.
        """
        return self.options.fit_sizes(self.nodes * self.devices, self.devices)

    def layout(self) -> Layout:
        """Return the layout that the configuration asks for.

        Raises:
            MeshError: The sizes do not fit the devices.
        """
        options, sizes, pieces = self.options, self.sizes(), 1
        if sizes.pipeline > 1:
            pieces = min(options.microbatches(sizes.pipeline), self.batch_size)
        virtual = options.virtual_pipeline_size
        return Layout(
            sizes=sizes,
            micro_batch=-(-self.batch_size // pieces),
            microbatches=pieces * self.accumulated,
            zero_stage=options.zero_stage,
            schedule=options.schedule,
            virtual=2 if virtual == "auto" else virtual,
            recompute=self.recompute,
            sequence_parallel=options.sequence_parallel,
            offload=options.offload_options is not None,
            expert_max_rows=options.expert_max_rows,
            blocks=tuple(options.stage_blocks or ()),
        )


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what runs on what."""
    takes_file(parser.add_argument("--config", required=True, help="as for fit"))
    parser.add_argument("--device", default="h100", help="name of a device profile (default: h100)")
    takes_file(parser.add_argument("--profile", help="a file of your own with device profiles"))
    parser.add_argument("--nodes", type=int, default=1, help="default: 1")
    parser.add_argument("--devices", type=int, default=8, help="of each node (default: 8)")
    parser.add_argument("--length", type=int, help="tokens of a sequence; default: as configured")
    takes_file(
        parser.add_argument(
            "--picture", help="draw the pipeline, time and memory to this .png, .svg or .pdf"
        )
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def read_run(
    options: argparse.Namespace, more: list[str], *, as_configured: bool = False
) -> PlannedRun:
    """Build the configured model on the meta device, and read what a prediction needs.

    Args:
        options: Of `add_machine_options`.
        more: Other arguments of ``lightning-par fit``.
        as_configured: Leave the Trainer its number of devices, which the sizes of its strategy may
            be written for, in place of that of the asked machine.

    Raises:
        ConfigurationError: The model is no transformer of equal blocks, or the strategy is not one
            of this package, or there is no such profile.
    """
    if options.picture:
        check_picture_path(options.picture)  # before what takes long
    device = load_profile(options.device, options.profile)
    # The devices of another machine need not exist here: a Trainer on the CPU takes any number.
    machine = {"accelerator": "cpu"}
    if not as_configured:
        machine |= {"devices": options.devices, "num_nodes": options.nodes}
    arguments = [f"--config={options.config}", *more]
    arguments += [f"--trainer.{name}={value}" for name, value in machine.items()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        run = configure(arguments, on_meta=True)
    strategy = run.trainer.strategy
    assert isinstance(strategy, MeshStrategy)
    data = getattr(run.datamodule, "hparams", {})
    traced = _Traced(run)
    trainer: Any = run.trainer
    callbacks = [c for c in trainer.callbacks if isinstance(c, ActivationCheckpointing)]
    shape = traced.shape(options.length or data.get("length"), eager=device.runs_eagerly)
    batch_size = data.get("batch_size") or traced.batch_size
    return PlannedRun(
        planner=Planner(
            shape=shape, device=device, code=implementation(str(run.trainer.precision), device)
        ),
        nodes=trainer.num_nodes,
        devices=trainer.num_devices,
        batch_size=int(batch_size),
        accumulated=run.trainer.accumulate_grad_batches,
        options=strategy.options,
        recompute=callbacks[0].recomputation.mode if callbacks else "none",
        accepts=traced.accepts,
    )


class _Traced:
    """What is read of a configured model and its data, as far as it is needed."""

    def __init__(self, run: ConfiguredRun) -> None:
        self._run, self._checked = run, dict[tuple[Any, ...], bool]()
        self._is_traced = False

    def shape(self, length: int | None, *, eager: bool) -> TransformerShape:
        """Return the model's shape: from a configuration, or from a trace of its step."""
        module = self._run.model
        config = getattr(module, "config", None)
        own = type(module).__module__.startswith("lightning_par.")
        if own and not eager and config is not None and not isinstance(config, str):
            return read_shape(config, length)  # it trains all of its weights: no need to build it
        with record_construction(), self._run.trainer.precision_plugin.module_init_context():
            module.configure_model()
        return shape_of(
            module,
            length,
            plan=self._find_plan,
            example=lambda: self._example,
            eager=eager,
        )

    @cached_property
    def _example(self) -> Any:
        """A batch of the training data; None: there is none to see."""
        try:
            return first_batches(self._run, 1)[0]
        except Exception:  # of data of the user; the run will meet it again
            return None

    @property
    def batch_size(self) -> int:
        """Samples of the batch that was traced; 1 where none was."""
        first = next((t for _, t in input_paths(self._example) if t.ndim), None)
        return len(first) if self._is_traced and first is not None else 1

    @cached_property
    def _plan(self) -> ParallelPlan:
        given = self._strategy.options.plan or find_plan(self._run.model)
        return given or infer_plan(self._run.model, example=self._example)

    def _find_plan(self) -> ParallelPlan:
        self._is_traced = True
        return self._plan

    @property
    def _strategy(self) -> MeshStrategy:
        strategy = self._run.trainer.strategy
        assert isinstance(strategy, MeshStrategy)
        return strategy

    def accepts(self, sizes: ParallelSizes, zero: int) -> bool:
        """Tell whether the plan of a traced model fits a mesh."""
        if not self._is_traced:
            return True
        kind = sizes.tensor, sizes.pipeline, sizes.context, sizes.data > 1, zero
        if kind not in self._checked:
            options = replace(
                self._strategy.options, zero_stage=zero, plan=self._plan, stage_blocks=None
            )
            try:
                check_module(self._run.model, options, sizes)
                self._checked[kind] = True
            except LightningParError:
                self._checked[kind] = False
        return self._checked[kind]
