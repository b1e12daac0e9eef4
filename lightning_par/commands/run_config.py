"""Model, data and Trainer of a ``lightning-par fit`` command line, built but not started."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import yaml
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_par.commands.parallel_cli import ParallelCLI
from lightning_par.engine.init.deferred_init import record_construction
from lightning_par.errors import ConfigurationError
from lightning_par.strategies.mesh_strategy import MeshStrategy

__all__ = ["ConfiguredRun", "configure", "read_settings"]


class ConfiguredRun(ParallelCLI):
    """`ParallelCLI` that builds model, data and Trainer, and does not run the subcommand."""

    on_meta = False

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self._start_from_own_defaults(parser, args)
        # Not super(): it warns of arguments that are given while sys.argv has some, too.
        self.config = parser.parse_args(args)

    @override
    def instantiate_classes(self) -> None:
        if not self.on_meta:
            super().instantiate_classes()
            return
        # A constructor that makes parameters makes them on the meta device.
        with record_construction():
            super().instantiate_classes()

    def fit(self, **_: Any) -> None:
        """Stand for `Trainer.fit` and do nothing: the caller wants the objects only."""


# A class and not an argument: LightningCLI builds everything inside __init__.
class _MetaRun(ConfiguredRun):
    on_meta = True


def configure(
    arguments: Sequence[str], *, on_meta: bool, kind: type[ConfiguredRun] | None = None
) -> ConfiguredRun:
    """Build the model, data and Trainer that ``lightning-par fit`` would run.

    Args:
        arguments: What follows ``lightning-par fit``.
        on_meta: Whether parameters are created on the meta device, without memory.
        kind: Class that builds them; None: the one that `on_meta` says.

    Raises:
        ConfigurationError: The Trainer's strategy is not one of this package.
    """
    chosen: Any = kind or (_MetaRun if on_meta else ConfiguredRun)
    run: ConfiguredRun = chosen(
        L.LightningModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=0,
        save_config_callback=None,
        args=["fit", *arguments],
    )
    if not isinstance(run.trainer.strategy, MeshStrategy):
        raise ConfigurationError(
            "LP903",
            f"trainer.strategy is a {type(run.trainer.strategy).__name__}, which places whole "
            "models; name one of this package, such as --trainer.strategy=hybrid3d.",
        )
    return run


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
        raise ConfigurationError("LP905", f"--config {path}: there is no such file.")
    settings: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    trainer = settings.get("trainer") or {}
    for held in (settings, trainer):
        for name in {"model", "data", "strategy"} & held.keys():
            held[name] = _piece(held[name], path.parent)
    callbacks = trainer.get("callbacks")
    if isinstance(callbacks, list):
        trainer["callbacks"] = [_piece(callback, path.parent) for callback in callbacks]
    elif callbacks is not None:
        trainer["callbacks"] = _piece(callbacks, path.parent)
    return settings


def _piece(value: Any, folder: Path) -> Any:
    """Return the contents of the file that a value names; any other value as it is."""
    path = folder / value if isinstance(value, str) else folder
    return yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else value
