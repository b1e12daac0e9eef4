"""A configured run as `search` and `forecast` see it: model, batch and layout."""

import argparse
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import yaml

from lightning_par.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_par.commands import takes_file
from lightning_par.commands.run_config import configure, ConfiguredRun, read_settings
from lightning_par.commands.verify import first_batches
from lightning_par.engine.batch import find_batch_dims
from lightning_par.engine.init.deferred_init import record_construction
from lightning_par.errors import ConfigurationError, LightningParError
from lightning_par.plan.inference.forked import run_forked
from lightning_par.plan.inference.infer import infer_plan
from lightning_par.plan.lookup import find_plan
from lightning_par.plan.parallel_plan import BatchLayout, ParallelPlan
from lightning_par.planner.block_trace import length_of_step, shape_of
from lightning_par.planner.model_parts import TracedShape
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

_DEVICE, _DEVICES = "h100", 8
"""Device, and devices of a node, of a machine of which nothing is said."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A run on a machine that need not be here.

    Attributes:
        planner: Of its model, on the asked device.
        nodes: Of the Trainer.
        devices: Of each node.
        batch_size: Samples of a replica's batch, as the data make them; None: no one can say.
        samples: Of a step of all replicas, as asked for; None: as many as the batches hold.
        accumulated: Batches of an optimizer step.
        sources: Where the numbers come from, and what says others.
        options: Of its strategy.
        recompute: What its callbacks recompute.
        accepts: Of a mesh with a ZeRO stage, whether the model can be put on it.
    """

    planner: Planner
    nodes: int
    devices: int
    batch_size: int | None
    samples: int | None
    accumulated: int
    sources: tuple[str, ...]
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
            ConfigurationError: The samples of a batch are not known.
        """
        sizes = self.sizes()
        return Layout.from_options(
            self.options,
            sizes,
            self._samples_of_batch(sizes),
            accumulated=self.accumulated,
            recompute=self.recompute,
        )

    def _samples_of_batch(self, sizes: ParallelSizes) -> int:
        if self.samples is None:
            if self.batch_size is None:
                raise ConfigurationError(
                    "LP905",
                    "the samples of a batch are not known: the training data cannot be looked at "
                    "here, and data.init_args has no batch_size. Write --samples N, those of a "
                    "step on all replicas.",
                )
            return self.batch_size
        batches = sizes.data * self.accumulated
        if self.samples % batches:
            raise ConfigurationError(
                "LP905",
                f"--samples {self.samples}: {sizes.data} replicas with {self.accumulated} batches "
                f"each take a multiple of {batches} samples a step.",
            )
        return self.samples // batches

    def describe(self, samples: int, nodes: int, devices: int) -> str:
        """Return what is predicted, and where its numbers come from.

        Args:
            samples: Of a step.
            nodes: Of the machine.
            devices: Of each node.
        """
        shape = self.planner.shape
        return "\n".join(
            [
                f"{shape.parameters / 1e9:.3g} billion parameters, {samples} samples of "
                f"{shape.length} tokens a step, {nodes} x {devices} {self.planner.device.name}",
                *self.sources,
            ]
        )


def add_machine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what runs on what."""
    takes_file(parser.add_argument("--config", required=True, help="as for fit"))
    parser.add_argument("--device", help=f"name of a device profile (default: {_DEVICE})")
    takes_file(parser.add_argument("--profile", help="a file of your own with device profiles"))
    parser.add_argument("--nodes", type=int, help="default: as configured")
    parser.add_argument(
        "--devices", type=int, help=f"of each node; default: as configured, else {_DEVICES}"
    )
    parser.add_argument("--length", type=int, help="tokens of a sequence; default: of the data")
    parser.add_argument("--samples", type=int, help="of a step, all replicas; default: of the data")
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
        options: Of `add_machine_options`; the device, nodes and devices that are not given are set.
        more: Other arguments of ``lightning-par fit``.
        as_configured: Leave the Trainer its number of devices, which the sizes of its strategy may
            be written for, in place of that of the asked machine.

    Raises:
        ConfigurationError: The model is no transformer of equal blocks, or the strategy is not one
            of this package, or there is no such profile.
    """
    if options.picture:
        check_picture_path(options.picture)  # before what takes long
    sources = [*_choose_machine(options, more)]
    device = load_profile(options.device, options.profile)
    # The devices of another machine need not exist here: a Trainer on the CPU takes any number.
    machine = {"accelerator": "cpu"}
    if not as_configured or not isinstance(_configured(options, more, "devices"), int):
        machine |= {"devices": options.devices, "num_nodes": options.nodes}
    arguments = [f"--config={options.config}", *more]
    arguments += [f"--trainer.{name}={value}" for name, value in machine.items()]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
        run = configure(arguments, on_meta=True)
    strategy = run.trainer.strategy
    assert isinstance(strategy, MeshStrategy)
    traced = _Traced(run)
    trainer: Any = run.trainer
    callbacks = [c for c in trainer.callbacks if isinstance(c, ActivationCheckpointing)]
    shape = traced.shape(options.length, eager=device.runs_eagerly)
    batch_size = None if options.samples else traced.batch_size
    return PlannedRun(
        planner=Planner(
            shape=shape, device=device, code=implementation(str(run.trainer.precision), device)
        ),
        nodes=trainer.num_nodes,
        devices=trainer.num_devices,
        batch_size=batch_size,
        samples=options.samples,
        accumulated=run.trainer.accumulate_grad_batches,
        sources=(*traced.sources, *sources),
        options=strategy.options,
        recompute=callbacks[0].recomputation.mode if callbacks else "none",
        accepts=traced.accepts,
    )


def _choose_machine(options: argparse.Namespace, more: list[str]) -> Iterator[str]:
    """Set what of the machine is not given; yield what is assumed."""
    if options.device is None:
        options.device = _DEVICE
        yield f"device: {_DEVICE}, assumed; --device names another"
    for name, trainers, otherwise in (("devices", "devices", _DEVICES), ("nodes", "num_nodes", 1)):
        if getattr(options, name) is not None:
            continue
        configured = _configured(options, more, trainers)
        chosen = configured if isinstance(configured, int) else otherwise
        setattr(options, name, chosen)
        why = (
            f"where trainer.{trainers} is {configured!r}"
            if configured != chosen
            else "as configured"
        )
        yield f"{name}: {chosen}, {why}; --{name} says another"


def _configured(options: argparse.Namespace, more: list[str], name: str) -> Any:
    """Return a number of the Trainer, or what else is configured, before anything is built."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--trainer.{name}", dest="value", type=yaml.safe_load)
    given = parser.parse_known_args(more)[0].value
    if given is None:
        given = (read_settings(options.config).get("trainer") or {}).get(name)
    if isinstance(given, list):
        return len(given)
    return int(given) if isinstance(given, str) and given.isdecimal() else given


class _Traced:
    """What is read of a configured model and its data, as far as it is needed."""

    def __init__(self, run: ConfiguredRun) -> None:
        self._run, self._checked = run, dict[tuple[Any, ...], bool]()
        self._is_traced = False
        self.sources: list[str] = []

    def shape(self, length: int | None, *, eager: bool) -> TransformerShape:
        """Return the model's shape: from a configuration, or from a trace of its step."""
        module = self._run.model
        config = getattr(module, "config", None)
        source = "--length"
        if length is None and "length" in self._own_settings:
            length, source = int(self._own_settings["length"]), "data.init_args.length"
        own = type(module).__module__.startswith("lightning_par.")
        # It trains all of its weights: no need to build it.
        built = not own or eager or config is None or isinstance(config, str)
        if length is None or built:
            with record_construction(), self._run.trainer.precision_plugin.module_init_context():
                module.configure_model()
        if built:
            shape = shape_of(
                module,
                length,
                plan=self._find_plan,
                example=lambda: self._example,
                eager=eager,
                seen=lambda: self._length,
            )
        else:
            shape = read_shape(config, length or self._length)
        if length is None:
            source = "a step with the first batch"
            if not isinstance(shape, TracedShape) and self._length is None:
                source = "the longest that the model allows, as no step with a batch was traced"
            source += "; --length says another"
        self.sources.append(f"tokens of a sample: {shape.length}, of {source}")
        return shape

    @property
    def _own_settings(self) -> Mapping[str, Any]:
        """The arguments of a data module of this package, which makes what they say."""
        data = self._run.datamodule
        own = type(data).__module__.startswith("lightning_par.")
        return data.hparams if own else {}

    @cached_property
    def _length(self) -> int | None:
        return length_of_step(self._run.model, lambda: self._example)

    @cached_property
    def _example(self) -> Any:
        """A batch of the training data; None: there is none to see."""
        try:
            return first_batches(self._run, 1)[0]
        except Exception:  # of data of the user; the run will meet it again
            return None

    @cached_property
    def batch_size(self) -> int | None:
        """Samples of a replica's batch; None: no one can say."""
        size, source = self._own_settings.get("batch_size"), "data.init_args.batch_size"
        if size is None:
            with suppress(Exception):  # of data of the user
                size, source = run_forked(self._seen_size), "the first batch"
        if size is None:
            configured = self._run.config["fit"].get("data.init_args") or {}
            size, source = configured.get("batch_size"), "data.init_args.batch_size"
        if not isinstance(size, int):
            return None
        self.sources.append(f"samples of a replica's batch: {size}, of {source}")
        return size

    def _seen_size(self) -> int | None:
        given = self._strategy.options.plan or find_plan(self._run.model)
        found = find_batch_dims(self._example, given.batch if given else BatchLayout())
        return None if found.unsure else found.size

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
