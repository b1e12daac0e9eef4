"""`ParallelCLI`: the `LightningCLI` behind ``lightning-par fit|validate|test|predict``.

Importing lightning_par registers its strategies, so that their names work in YAML as
``trainer.strategy``.
"""

import os
import re
import sys
from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

import lightning_par
import lightning_par.strategies  # so that their classes are known by name alone
from lightning_par.engine.data.islands.environment import ISLAND_VARIABLE
from lightning_par.errors import ConfigurationError, nearest
from lightning_par.strategies import MeshStrategy

__all__ = ["SETTINGS", "ParallelCLI", "make_cli"]

_NAME = "lightning-par"
_DEFAULTS = {
    "model": {"class_path": "lightning_par.models.GPTModule"},
    "data": {"class_path": "lightning_par.models.TextDataModule"},
}
# Lines of jsonargparse's message that say nothing of the mistake, such as one for every member of a
# Union type that the value is not.
_BOILERPLATE = re.compile(
    r"Does not validate against any|Subtypes: |Errors:$|- Expected a <class 'NoneType'>|Given value"
)


class _Parser(LightningArgumentParser):
    """Parser whose error messages are the problem and the nearest option.

    The base class lists every option first, which are some hundred lines here.
    """

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        # The mistake is mostly in the options of the subcommand, which has a parser of its own.
        parser = getattr(ex, "subcommand_parser", None) or self
        name = parser.prog.replace(" [options]", "")
        lines = [line for line in message.splitlines() if not _BOILERPLATE.match(line.strip())]
        unknown = re.search(r"ption '([^']+)'", message)
        if unknown:
            # Compared without the groups: a wrong group must not hide a right name.
            wanted = unknown.group(1).rpartition(".")[2]
            known = {key.rpartition(".")[2] for key in _options(parser)}
            lines[-1] += nearest(wanted, known, cutoff=0.6, otherwise="")
        print(f"{name}: error: " + "\n".join(lines), file=sys.stderr)
        print(f"{name} --help lists every option.", file=sys.stderr)
        self.exit(2)


def _options(parser: LightningArgumentParser) -> list[str]:
    return [str(key) for key in parser.get_defaults().keys()]  # noqa: SIM118  (a Namespace)


class ParallelCLI(LightningCLI):
    """`LightningCLI` for any LightningModule and any data module.

    Without ``model`` and ``data`` it trains the reference GPT on the sources of Python's standard
    library; ``data: null`` leaves the data to the model.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Set the default ``model`` and ``data``.

        Args:
            parser: Parser of one subcommand.
        """
        parser.set_defaults(_DEFAULTS)
        self._parsers = [*getattr(self, "_parsers", []), parser]

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Parse the arguments; a class that they name starts from its own defaults.

        Args:
            parser: Parser of the command line.
            args: Arguments without the program's name; None: those of this process.
        """
        self._start_from_own_defaults(parser, args)
        super().parse_arguments(parser, args)

    def _start_from_own_defaults(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        """Make the classes that the arguments name the default ones, as far as they name any.

        jsonargparse keeps the values of the default class for arguments of the same name.
        """
        words = sys.argv[1:] if args is None else args
        if not isinstance(words, list):
            return
        # The one left out prints and ends the process.
        config = parser.parse_args([w for w in words if not str(w).startswith("--print_config")])
        found = config.get(str(config.get("subcommand")), config)
        for key, default in _DEFAULTS.items():
            named = found.get(f"{key}.class_path")
            if named is not None and named != default["class_path"]:
                for each in self._parsers:
                    each.set_defaults({key: {"class_path": named}})

    def before_fit(self) -> None:
        """Check that one of several islands knows that it is one.

        Raises:
            ConfigurationError: The environment says so, and the strategy does not.
        """
        place, strategy = os.environ.get(ISLAND_VARIABLE), self.trainer.strategy
        options = strategy.options if isinstance(strategy, MeshStrategy) else None
        if place is not None and (options is None or options.outer is None):
            raise ConfigurationError(
                "LP705",
                f"{ISLAND_VARIABLE}={place} says that this run is one of several islands, but "
                f"{type(strategy).__name__} has no outer=, so the islands would never exchange "
                "weights. Pass outer=, as in --trainer.strategy=lightning_par.Hybrid3DStrategy "
                "--trainer.strategy.outer.every=50.",
            )

    def before_instantiate_classes(self) -> None:
        """Check the name of the strategy.

        Raises:
            ConfigurationError: No strategy is registered under that name.
        """
        # The Trainer would also refuse it, but only after the model and the data are built.
        name = self.config.get(str(self.subcommand), self.config).get("trainer.strategy")
        known = ["auto", *StrategyRegistry.available_strategies()]
        if isinstance(name, str) and name not in known:
            hint = nearest(name, known, cutoff=0.6, otherwise=".")
            raise ConfigurationError(
                "LP904",
                f"trainer.strategy={name!r} is not registered{hint}\nThe registered strategies "
                f"are {', '.join(known)}.",
            )


SETTINGS: dict[str, Any] = {
    "model_class": L.LightningModule,
    "subclass_mode_model": True,
    "subclass_mode_data": True,
    "seed_everything_default": 0,
    "parser_class": _Parser,
    "parser_kwargs": {"prog": _NAME, "description": lightning_par.__doc__ or ""},
}
"""Arguments of every `ParallelCLI`."""


def make_cli(arguments: list[str] | None = None, *, run: bool = True) -> ParallelCLI:
    """Build model, data and Trainer from a command line, and run its subcommand.

    Args:
        arguments: Command line without the program's name; None: that of this process.
        run: Whether the first argument is a subcommand, which is run; False: there is none.

    Returns:
        The CLI, whose attributes hold model, data module and Trainer.
    """
    return ParallelCLI(**SETTINGS, save_config_kwargs={"overwrite": True}, args=arguments, run=run)
