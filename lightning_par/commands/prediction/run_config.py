"""Model, data and Trainer of a ``lightning-par fit`` command line, built but not started."""

import argparse
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import yaml
from lightning.pytorch.cli import LightningArgumentParser
from lightning.pytorch.strategies import StrategyRegistry
from typing_extensions import override

from lightning_par.commands.parallel_cli import ParallelCLI, SETTINGS
from lightning_par.engine.init.deferred_init import record_construction
from lightning_par.errors import ConfigurationError
from lightning_par.inference.infer import infer_plan
from lightning_par.inference.lookup import find_plan
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.presets import Hybrid3DStrategy

__all__ = ["ConfiguredRun", "configure", "read_settings", "trainer_number"]


class ConfiguredRun(ParallelCLI):
    """`ParallelCLI` that builds model, data and Trainer, and does not run the subcommand.

    Args:
        arguments: What follows ``lightning-par fit``.
        on_meta: See `configure`.
        on_cpu: See `configure`.
        plugins: More plugins of the Trainer.
        any_layout: See `configure`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        on_meta: bool,
        on_cpu: bool = False,
        plugins: Sequence[Any] = (),
        any_layout: bool = False,
    ) -> None:
        self._any_layout = any_layout
        self._on_meta, self._on_cpu = on_meta, on_cpu
        self._plugins = {"plugins": [*plugins]} if plugins else {}
        super().__init__(**SETTINGS, save_config_callback=None, args=["fit", *arguments])

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self._start_from_own_defaults(parser, args)
        # Not super(): it warns of arguments that are given while sys.argv has some, too.
        self.config = parser.parse_args(args)

    @override
    def instantiate_classes(self) -> None:
        # Constructors only: parsing imports the user's module, and its own tensors stay real.
        with record_construction() if self._on_meta else nullcontext():
            super().instantiate_classes()

    @override
    def instantiate_trainer(self, **options: Any) -> pl.Trainer:
        if self._on_cpu:
            options |= _place_on_cpu(self.config["fit"]["trainer"])
        if self._any_layout:
            options |= _with_own_strategy(self.config_init["fit"]["trainer"]["strategy"])
        return super().instantiate_trainer(**self._plugins, **options)

    @property
    def strategy(self) -> MeshStrategy:
        """The Trainer's strategy.

        Raises:
            ConfigurationError: It is not one of this package.
        """
        strategy = self.trainer.strategy
        if isinstance(strategy, MeshStrategy):
            return strategy
        raise ConfigurationError(
            "LP903",
            f"trainer.strategy is a {type(strategy).__name__}, but this command needs a "
            "strategy of lightning_par. Pass one, such as --trainer.strategy=hybrid3d.",
        )

    @property
    def given_plan(self) -> ParallelPlan | None:
        """The plan of the strategy's options, or that which the model declares."""
        return self.strategy.options.plan or find_plan(self.model)

    def build_model(self) -> None:
        """Call the model's `configure_model`, with parameters on the meta device."""
        with record_construction(), self.trainer.precision_plugin.module_init_context():
            self.model.configure_model()

    def take_inferred_plan(self) -> ParallelPlan | None:
        """Let the strategy have the plan that the structure of a built model suggests.

        Returns:
            The plan; None where the model declares one, or nothing needs it.
        """
        strategy, sizes = self.strategy, self.strategy.sizes
        if self.given_plan is not None or (sizes.tensor == 1 and sizes.pipeline == 1):
            return None
        plan = infer_plan(
            self.model,
            example=self.first_batches(1)[0],
            tensor_parallel_size=sizes.tensor,
            pipeline_parallel_size=sizes.pipeline,
        )
        strategy.options = replace(strategy.options, plan=plan)
        return plan

    def first_batches(self, steps: int) -> list[Any]:
        """Return the first training batches; if there are fewer, they repeat.

        Args:
            steps: How many.
        """
        source = self.model if self.datamodule is None else self.datamodule
        # The Trainer would call these hooks, but only inside fit.
        source.prepare_data()
        if self.datamodule is not None:
            self.datamodule.setup("fit")
        found = list(islice(source.train_dataloader(), steps))
        return list(islice(cycle(found), steps))

    def fit(self, **_: Any) -> None:
        """Stand for `Trainer.fit` and do nothing: the caller wants the objects only."""


def configure(
    arguments: Sequence[str],
    *,
    on_meta: bool,
    on_cpu: bool = False,
    plugins: Sequence[Any] = (),
    any_strategy: bool = False,
    any_layout: bool = False,
) -> ConfiguredRun:
    """Build the model, data and Trainer that ``lightning-par fit`` would run.

    Args:
        arguments: What follows ``lightning-par fit``.
        on_meta: Whether parameters are created on the meta device, without memory.
        on_cpu: Whether the Trainer is one for the CPU, if the number of devices is configured: on
            the CPU there may be any number, and devices of another machine need not exist here.
        plugins: More plugins of the Trainer.
        any_strategy: Whether the Trainer may have a strategy that is not of this package.
        any_layout: Whether such a strategy is replaced by one of this package, which makes as many
            replicas as it.

    Raises:
        ConfigurationError: The Trainer's strategy is not one of this package; or it is for devices
            that this machine lacks, and nothing says how many.
    """
    run = ConfiguredRun(
        arguments, on_meta=on_meta, on_cpu=on_cpu, plugins=plugins, any_layout=any_layout
    )
    if not any_strategy:
        _ = run.strategy  # raises where it is another's
    return run


def _with_own_strategy(strategy: Any) -> dict[str, Any]:
    """Return replicas on all devices in the place of a strategy that is not of this package."""
    if isinstance(strategy, str) and strategy in StrategyRegistry:
        strategy = StrategyRegistry.get(strategy)
    if isinstance(strategy, MeshStrategy):
        return {}
    return {"strategy": Hybrid3DStrategy(tensor_parallel_size=1, pipeline_parallel_size=1)}


def _place_on_cpu(trainer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of the Trainer that replace its devices by as many CPUs."""
    accelerator, number = trainer["accelerator"], _count(trainer["devices"])
    if isinstance(number, int) and number > 0:  # -1 stands for all that are here
        return {"accelerator": "cpu", "devices": number}
    if accelerator not in ("auto", "cpu") and not torch.accelerator.is_available():
        raise ConfigurationError(
            "LP905",
            f"trainer.devices={number!r} stands for all devices of this machine, but this machine "
            f"has no device of trainer.accelerator={accelerator!r}. Pass the number of devices, "
            "such as --trainer.devices=8.",
        )
    return {}


def trainer_number(config: str, arguments: Sequence[str], name: str) -> Any:
    """Return a number of the Trainer before anything is built; None: nothing is said.

    Args:
        config: Configuration file of ``fit``.
        arguments: More arguments of ``fit``, which count before the file.
        name: ``"devices"``, of which a list counts as its length, or ``"num_nodes"``.

    Returns:
        A number, or what else is configured, such as ``"auto"``.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(f"--trainer.{name}", dest="value", type=_from_yaml)
    given = parser.parse_known_args(arguments)[0].value
    if given is None:
        given = (read_settings(config).get("trainer") or {}).get(name)
    return _count(given)


def _count(devices: Any) -> Any:
    """Return the length of a list of devices, the number of a text, and all else as it is."""
    if isinstance(devices, list):
        return len(devices)
    return int(devices) if isinstance(devices, str) and devices.isdecimal() else devices


def _from_yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"{text!r} cannot be read as YAML") from error


def read_settings(config: str | Path) -> dict[str, Any]:
    """Return what a configuration file of ``fit`` says, in one piece.

    Args:
        config: The file. Where it names other files for the strategy, callbacks, model or data, as
            in ``strategy: ../strategies/zero3.yaml``, their contents stand in their place.

    Raises:
        ConfigurationError: There is no such file.
    """
    path = Path(config)
    if not path.is_file():
        raise ConfigurationError(
            "LP905",
            f"--config {path} names a file that does not exist. Pass the path of a configuration "
            "file.",
        )
    settings: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    for held in (settings, settings.get("trainer") or {}):
        for name in {"model", "data", "strategy", "callbacks"} & held.keys():
            held[name] = _piece(held[name], path.parent)
    return settings


def _piece(value: Any, folder: Path) -> Any:
    """Return the contents of the files that a value names; any other value as it is."""
    if isinstance(value, list):
        return [_piece(each, folder) for each in value]
    path = folder / value if isinstance(value, str) else folder
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else value
