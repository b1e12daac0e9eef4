"""A run of ``lightning-par fit`` that is built from its arguments and not started."""

from collections.abc import Sequence
from typing import Any

import lightning as L
from lightning.pytorch.cli import LightningArgumentParser
from typing_extensions import override

from lightning_par.cli import ParallelCLI
from lightning_par.engine.init.deferred_init import record_construction
from lightning_par.errors import ConfigurationError
from lightning_par.strategies.mesh_strategy import MeshStrategy

__all__ = ["ConfiguredRun", "configure"]


class ConfiguredRun(ParallelCLI):
    """Builds model, data and Trainer, and leaves it at that."""

    on_meta = False

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = parser.parse_args(args)  # the base class warns that the process has others

    @override
    def instantiate_classes(self) -> None:
        if not self.on_meta:
            super().instantiate_classes()
            return
        with record_construction():
            super().instantiate_classes()

    def fit(self, **_: Any) -> None:
        """Stand for `Trainer.fit`; starts nothing."""


class _MetaRun(ConfiguredRun):
    on_meta = True


def configure(arguments: Sequence[str], *, on_meta: bool) -> ConfiguredRun:
    """Build what ``lightning-par fit`` would run.

    Args:
        arguments: Of that command.
        on_meta: Parameters that constructors make take no memory.

    Raises:
        ConfigurationError: The Trainer has no strategy of this package.
    """
    kind: Any = _MetaRun if on_meta else ConfiguredRun
    run: ConfiguredRun = kind(
        L.LightningModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        seed_everything_default=0,
        save_config_callback=None,
        args=["fit", *arguments],
    )
    if not isinstance(run.trainer.strategy, MeshStrategy):
        raise ConfigurationError(
            f"trainer.strategy is a {type(run.trainer.strategy).__name__}, which places whole "
            "models; name one of this package, such as --trainer.strategy=hybrid3d."
        )
    return run
