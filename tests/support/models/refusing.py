"""A model of a user that does not train under one ZeRO stage."""

from typing_extensions import override

from lightning_par.models import GPTModule

__all__ = ["RefusesZero1"]


class RefusesZero1(GPTModule):
    """Raises where a run begins, as what a user's own hook finds wrong."""

    @override
    def on_train_start(self) -> None:
        if self.trainer.strategy.options.zero_stage == 1:
            raise RuntimeError("not with ZeRO stage 1")
