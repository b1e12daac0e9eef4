"""A configured run as `search` and `forecast` see it: model, batch and layout."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from lightning_par.callbacks.activation_checkpointing import ActivationCheckpointing
from lightning_par.commands.prediction.layout_picture import draw_candidate
from lightning_par.commands.prediction.machine import Machine
from lightning_par.commands.prediction.run_config import configure, trainer_number
from lightning_par.engine.batch import find_batch_dims
from lightning_par.errors import ConfigurationError, LightningParError
from lightning_par.inference.forked import run_forked
from lightning_par.inference.infer import infer_plan
from lightning_par.plan.parallel_plan import BatchLayout, ParallelPlan
from lightning_par.planner.block_trace import length_of_step, shape_of
from lightning_par.planner.model_parts import TracedShape
from lightning_par.planner.model_shape import read_shape
from lightning_par.planner.profiles import implementation, load_profile
from lightning_par.planner.search import Candidate, Planner
from lightning_par.planner.shapes import Layout, TransformerShape
from lightning_par.profiling.picture_file import check_picture_path
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.setup.checks import check_module

__all__ = ["PlannedRun"]

_DEVICE, _DEVICES = "h100", 8
"""Device, and devices of a node, of a machine of which nothing is said."""


class PlannedRun:
    """A configured run on a machine that need not be here, with its model on the meta device.

    Args:
        machine: What is asked for.
        more: More arguments of ``lightning-par fit``.
        any_layout: Whether the layout is searched for: the Trainer may have a strategy of another,
            and keeps its number of devices, which the sizes of its strategy may be written for, in
            place of that of the asked machine.

    Attributes:
        planner: Of its model, on the asked device.
        nodes: Of the machine, as asked for or configured.
        devices: Of each node.
        options: Of its strategy.

    Raises:
        ConfigurationError: The model is no transformer of equal blocks, or the strategy is not one
            of this package though its layout is asked for, or there is no such profile.
    """

    def __init__(self, machine: Machine, more: Sequence[str], *, any_layout: bool = False) -> None:
        if machine.picture:
            check_picture_path(machine.picture)  # before what takes long
        self._asked = machine
        assumed = [] if machine.device else [f"device: {_DEVICE}, assumed; --device names another"]
        device = load_profile(machine.device or _DEVICE, machine.profile)
        configured = trainer_number(machine.config, more, "devices")
        self.devices, source = _choose("devices", "devices", machine.devices, configured, _DEVICES)
        number = trainer_number(machine.config, more, "num_nodes")
        self.nodes, other = _choose("nodes", "num_nodes", machine.nodes, number, 1)
        # The devices of another machine need not exist here: a Trainer on the CPU takes any number.
        settings: dict[str, Any] = {"accelerator": "cpu"}
        if not any_layout or not isinstance(configured, int):
            settings |= {"devices": self.devices, "num_nodes": self.nodes}
        arguments = [f"--config={machine.config}", *more]
        arguments += [f"--trainer.{name}={value}" for name, value in settings.items()]
        self._run = run = configure(arguments, on_meta=True, any_layout=any_layout)
        self.options = run.strategy.options
        self._checked = dict[tuple[Any, ...], bool]()
        self._is_traced = False
        self._sources: list[str] = []
        self.planner = Planner(
            shape=self._shape(machine.length, eager=device.runs_eagerly),
            device=device,
            code=implementation(str(run.trainer.precision), device),
        )
        self._batch_size = None if machine.samples else self._find_batch_size()
        if machine.samples:
            self._sources.append(f"samples of a step: {machine.samples}, from --samples")
        precision = f"precision: {run.trainer.precision}, from trainer.precision"
        self._sources += [*assumed, *source, *other, precision, self._memory()]

    def _memory(self) -> str:
        planner = self.planner
        return (
            f"memory: {planner.limit / 2**30:.1f} GiB of a device, {planner.margin:.0%} of what "
            f"{planner.device.name} has"
        )

    def layout(self) -> Layout:
        """Return the layout that the configuration asks for.

        Raises:
            MeshError: The sizes do not fit the devices.
            ConfigurationError: The samples of a batch are not known.
        """
        options, trainer = self.options, self._run.trainer
        devices = trainer.num_nodes * trainer.num_devices
        sizes = options.fit_sizes(devices, trainer.num_devices)
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        modes = [c.recomputation.mode for c in callbacks if isinstance(c, ActivationCheckpointing)]
        return Layout.from_options(
            options,
            sizes,
            self._samples_of_batch(sizes),
            accumulated=trainer.accumulate_grad_batches,
            recompute=modes[0] if modes else "none",
        )

    def _samples_of_batch(self, sizes: ParallelSizes) -> int:
        samples, accumulated = self._asked.samples, self._run.trainer.accumulate_grad_batches
        if samples is None:
            if self._batch_size is None:
                raise ConfigurationError(
                    "LP905",
                    "the number of samples in a batch is not known: the training data cannot be "
                    "loaded here, and data.init_args has no batch_size. Pass --samples N, the "
                    "number of samples of a step on all replicas.",
                )
            return self._batch_size
        if samples % (batches := sizes.data * accumulated):
            raise ConfigurationError(
                "LP905",
                f"--samples {samples} cannot be divided equally over {sizes.data} replicas and "
                f"{accumulated} accumulated batches. Pass a multiple of {batches}.",
            )
        return samples // batches

    def describe(self, samples: int) -> str:
        """Return what is predicted, and where its numbers come from.

        Args:
            samples: Of a step.
        """
        shape = self.planner.shape
        return "\n".join(
            [
                f"{shape.parameters / 1e9:.3g} billion parameters, {samples} samples of "
                f"{shape.length} tokens a step, {self.nodes} x {self.devices} "
                f"{self.planner.device.name}",
                *self._sources,
            ]
        )

    def show(self, one: Candidate, values: Mapping[str, Any]) -> bool:
        """Draw a layout and print `values` as JSON, as far as it is asked for.

        Returns:
            Whether JSON was printed, so that there shall be no text.
        """
        if self._asked.picture:
            draw_candidate(self.planner, one, self._asked.picture)
        if self._asked.json:
            print(json.dumps({**values, "sources": self._sources}, indent=1))
        return self._asked.json

    def _shape(self, length: int | None, *, eager: bool) -> TransformerShape:
        """Return the model's shape: from a configuration, or from a trace of its step."""
        module = self._run.model
        config = getattr(module, "config", None)
        source = "--length" if self.takes_length else "--length; the data keep their own length"
        if length is None and self.takes_length:
            length, source = int(self._own_settings["length"]), "data.init_args.length"
        own = type(module).__module__.startswith("lightning_par.")
        # It trains all of its weights: no need to build it.
        built = not own or eager or config is None or isinstance(config, str)
        if length is None or built:
            self._run.build_model()
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
                source = "the model's longest, as no step with a batch was traced"
            source += "; --length says another"
        self._sources.append(f"tokens of a sample: {shape.length}, from {source}")
        return shape

    @property
    def takes_length(self) -> bool:
        """Whether the data module is told how long a sample is."""
        return "length" in self._own_settings

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
            return self._run.first_batches(1)[0]
        except Exception:  # of data of the user; the run will meet it again
            return None

    def _find_batch_size(self) -> int | None:
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
        self._sources.append(f"samples of a replica's batch: {size}, from {source}")
        return size

    def _seen_size(self) -> int | None:
        given = self._run.given_plan
        found = find_batch_dims(self._example, given.batch if given else BatchLayout())
        return None if found.unsure else found.size

    @cached_property
    def _plan(self) -> ParallelPlan:
        return self._run.given_plan or infer_plan(self._run.model, example=self._example)

    def _find_plan(self) -> ParallelPlan:
        self._is_traced = True
        return self._plan

    def accepts(self, sizes: ParallelSizes, zero: int) -> bool:
        """Tell whether the plan of a traced model fits a mesh."""
        if not self._is_traced:
            return True
        kind = sizes.tensor, sizes.pipeline, sizes.context, sizes.data > 1, zero
        if kind not in self._checked:
            options = replace(self.options, zero_stage=zero, plan=self._plan, stage_blocks=None)
            try:
                check_module(self._run.model, options, sizes)
                self._checked[kind] = True
            except LightningParError:
                self._checked[kind] = False
        return self._checked[kind]


def _choose(
    name: str, trainers: str, asked: int | None, configured: Any, otherwise: int
) -> tuple[int, list[str]]:
    """Return a number of the machine, and a line that says where it comes from if not asked for."""
    if asked is not None:
        return asked, []
    if isinstance(configured, int):
        return configured, [f"{name}: {configured}, as configured; --{name} says another"]
    why = f"where trainer.{trainers} is {configured!r}"
    return otherwise, [f"{name}: {otherwise}, {why}; --{name} says another"]
