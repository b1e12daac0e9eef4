"""The command line: ``lightning-par fit|validate|test|predict --config run.yaml``.

Importing lightning_par registers its strategies, so that their names work in YAML as ``trainer.strategy``.
"""

from collections.abc import Sequence

import lightning as L  # noqa: N812
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningCLI

import lightning_par  # noqa: F401  (registers the strategies)

__all__ = ["ParallelCLI", "main"]

_MODEL = "lightning_par.models.GPTModule"
_DATA = "lightning_par.models.TextDataModule"


class ParallelCLI(LightningCLI):
    """A `LightningCLI` for any LightningModule and any data module.

    Without ``model`` and ``data`` it trains the reference GPT on the sources of Python's standard library.
    """

    def add_arguments_to_parser(self, parser: ArgumentParser) -> None:  # type: ignore[override]
        """Set what stands for ``model`` and ``data`` when nothing is said.

        Args:
            parser: Of one subcommand.
        """
        parser.set_defaults({"model": {"class_path": _MODEL}, "data": {"class_path": _DATA}})


def main(args: Sequence[str] | None = None) -> None:
    """Run one command.

    Args:
        args: Without the name of the program; None: those of the process. Strategies that start further
            processes repeat the command of the process, so give arguments here in single-process runs only.
    """
    ParallelCLI(
        L.LightningModule,
        L.LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=0,
        save_config_kwargs={"overwrite": True},
        parser_kwargs={"description": "Train with parallel strategies.", "prog": "lightning-par"},
        args=None if args is None else list(args),
    )


if __name__ == "__main__":
    main()
