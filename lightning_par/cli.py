"""The command line: ``lightning-par fit|validate|test|predict --config run.yaml``, and the commands
of `lightning_par.commands`.

Importing lightning_par registers its strategies, so that their names work in YAML as
``trainer.strategy``.
"""

import difflib
import re
import sys
from collections.abc import Iterable
from typing import NoReturn

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.strategies import StrategyRegistry

import lightning_par
from lightning_par.commands import COMMANDS, find_command
from lightning_par.errors import CheckpointError, ConfigurationError, LightningParError

__all__ = ["ParallelCLI", "main", "make_cli"]

_DEFAULTS = {
    "model": {"class_path": "lightning_par.models.GPTModule"},
    "data": {"class_path": "lightning_par.models.TextDataModule"},
}
_NOISE = re.compile(
    r"Does not validate against any|Subtypes: |Errors:$|- Expected a <class 'NoneType'>|Given value"
)


class _Parser(LightningArgumentParser):
    """Ends with the problem and the nearest option; the base class lists every option first."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        if not self.exit_on_error:
            super().error(message, ex)
        parser = getattr(ex, "subcommand_parser", None) or self
        name = parser.prog.replace(" [options]", "")
        lines = [line for line in message.splitlines() if not _NOISE.match(line.strip())]
        unknown = re.search(r"ption '([^']+)'", message)
        if unknown:
            wanted = unknown.group(1).rpartition(".")[2]
            lines[-1] += _nearest(wanted, (key.rpartition(".")[2] for key in _options(parser)))
        print(f"{name}: error: " + "\n".join(lines), file=sys.stderr)
        print(f"{name} --help lists every option.", file=sys.stderr)
        self.exit(2)


def _options(parser: LightningArgumentParser) -> list[str]:
    return [str(key) for key in parser.get_defaults().keys()]  # noqa: SIM118  (a Namespace)


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, set(names), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


class ParallelCLI(LightningCLI):
    """A `LightningCLI` for any LightningModule and any data module.

    Without ``model`` and ``data`` it trains the reference GPT on the sources of Python's standard
    library; ``data: null`` leaves the data to the model.
    """

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Set what stands for ``model`` and ``data`` when nothing is said.

        Args:
            parser: Of one subcommand.
        """
        parser.set_defaults(_DEFAULTS)

    def before_instantiate_classes(self) -> None:
        """Check the name of the strategy.

        Raises:
            ConfigurationError: No strategy is registered under that name.
        """
        name = self.config.get(str(self.subcommand), self.config).get("trainer.strategy")
        known = ["auto", *StrategyRegistry.available_strategies()]
        if isinstance(name, str) and name not in known:
            raise ConfigurationError(
                f"trainer.strategy={name!r} is not registered{_nearest(name, known)}\n"
                f"Registered are: {', '.join(known)}."
            )


def main() -> None:
    """Run the command that the arguments of this process give.

    Raises:
        SystemExit: With status 2 if an argument is wrong, and 1 if the configuration cannot run.
    """
    try:
        if sys.argv[1:] and sys.argv[1] in COMMANDS:
            sys.exit(find_command(sys.argv[1])(sys.argv[2:]))
        make_cli()
    except (ValueError, CheckpointError) as error:  # what else fails while it runs has a traceback
        ours = _find_ours(error)
        if ours is None:
            raise
        print(f"lightning-par: error: {ours}", file=sys.stderr)
        sys.exit(1)


def make_cli(arguments: list[str] | None = None, *, run: bool = True) -> ParallelCLI:
    """Build what a command line says, and run it.

    Args:
        arguments: By default those of this process.
        run: Whether the first of them is a subcommand to run; otherwise there is none.
    """
    return ParallelCLI(
        L.LightningModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=0,
        parser_class=_Parser,
        parser_kwargs={"prog": "lightning-par", "description": _description()},
        save_config_kwargs={"overwrite": True},
        args=arguments,
        run=run,
    )


def _description() -> str:
    """Say what the package is, and name the commands that Lightning's parser does not know."""
    more = [f"lightning-par {name}: {what}." for name, what in sorted(COMMANDS.items())]
    return " ".join([lightning_par.__doc__ or "", *(["Also:"] if more else []), *more])


def _find_ours(error: BaseException | None) -> LightningParError | None:
    """Return the error of this package that `error` is, or that jsonargparse has wrapped in it."""
    while error is not None and not isinstance(error, LightningParError):
        error = error.__cause__
    return error


if __name__ == "__main__":
    main()
