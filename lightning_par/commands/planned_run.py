"""A configured run as `search` and `forecast` see it: model, batch and layout."""

import argparse
import warnings
from dataclasses import dataclass
from typing import Any

from lightning_par.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_par.commands import takes_file
from lightning_par.commands.run_config import configure, ConfiguredRun
from lightning_par.engine.init.deferred_init import record_construction
from lightning_par.errors import ConfigurationError
from lightning_par.planner.model_shape import read_shape
from lightning_par.planner.profiles import implementation, load_profile
from lightning_par.planner.search import Planner
from lightning_par.planner.shapes import Layout, TransformerShape
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.options import MeshOptions

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
    """

    planner: Planner
    nodes: int
    devices: int
    batch_size: int
    accumulated: int
    options: MeshOptions
    recompute: Any

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
    trainer: Any = run.trainer
    callbacks = [c for c in trainer.callbacks if isinstance(c, ActivationCheckpointing)]
    shape = _shape(run, options.length or data.get("length"))
    return PlannedRun(
        planner=Planner(
            shape=shape, device=device, code=implementation(str(run.trainer.precision), device)
        ),
        nodes=trainer.num_nodes,
        devices=trainer.num_devices,
        batch_size=int(data.get("batch_size", 1)),
        accumulated=run.trainer.accumulate_grad_batches,
        options=strategy.options,
        recompute=callbacks[0].recomputation.mode if callbacks else "none",
    )


def _shape(run: ConfiguredRun, length: int | None) -> TransformerShape:
    """Return the model's shape from the module's configuration, or from that of its model."""
    config = getattr(run.model, "config", None)
    if config is None or isinstance(config, str):
        with record_construction():
            run.model.configure_model()
        config = getattr(getattr(run.model, "model", None), "config", None)
    if config is None:
        raise ConfigurationError(
            "LP907",
            f"{type(run.model).__name__} has neither `config` nor `model.config`: the sizes of its "
            "blocks are not known. Set one of them to a configuration such as GPTConfig.",
        )
    return read_shape(config, length)
