"""`AutoParallelStrategy`: the layout is chosen from the model, the data and the devices."""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Literal

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.optim import Optimizer
from typing_extensions import override

from lightning_par.sizes import AutoRule, ParallelSizes
from lightning_par.strategies.auto.choice import Choice, CHOSEN, LayoutChooser, Wish
from lightning_par.strategies.auto.first_steps import FirstSteps
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.setup.checks import check_trainer
from lightning_par.strategies.setup.preflight import one_speaks
from lightning_par.upstream.lightning import trainer_of

__all__ = ["AutoParallelStrategy"]


class AutoParallelStrategy(MeshStrategy):
    """Chooses the layout by itself: the fastest that is predicted for the model, the data and the
    devices that are there, of those that nothing refuses.

    The choice is made when a module is set up, once for each module, by rank 0 for all; it is
    logged with its prediction and the runner-up, and held against the first steps. Every replica
    draws batches of the size of its loader, as under DDP: give `data_parallel_size` to keep the
    samples of a step. What is given is kept.

    Args:
        profile: What a device can do: the name of a shipped profile, or the path of what
            ``lightning-par calibrate`` wrote. None: by the name of the GPU; on the CPU, a core.
        zero_stage: As in `MeshStrategy`, or "auto".
        schedule: As in `MeshStrategy`, or "auto".
        sequence_parallel: As in `MeshStrategy`, or "auto": where the tokens of all samples divide.
        options: Those of `MeshStrategy`.

    Attributes:
        choice: What was chosen; None until a module is set up.

    Raises:
        MeshError: No layout keeps the sizes given; raised by the Trainer's constructor.
        ConfigurationError: An option has no such value.
        TypeError: There is no such option.

    Examples:
        >>> strategy = AutoParallelStrategy(profile="h100", data_parallel_size=2)
        >>> trainer = L.Trainer(accelerator="cpu", devices=4, strategy=strategy)
    """

    strategy_name: ClassVar[str] = "auto_parallel"
    _auto_rule: ClassVar[AutoRule] = "planned"

    def __init__(
        self,
        *,
        profile: str | None = None,
        zero_stage: int | Literal["auto"] = "auto",
        schedule: str = "auto",
        sequence_parallel: bool | Literal["auto"] = "auto",
        **options: Any,
    ) -> None:
        super().__init__(
            zero_stage=1 if zero_stage == "auto" else zero_stage,
            schedule="1f1b" if schedule == "auto" else schedule,
            sequence_parallel=True if sequence_parallel == "auto" else sequence_parallel,
            **options,
        )
        self._given = {name: getattr(self.options, name) for name in CHOSEN}
        self._wish = Wish(
            profile=profile,
            zero_stage=zero_stage == "auto",
            schedule=schedule == "auto",
            sequence_parallel=sequence_parallel == "auto",
        )
        self.choice: Choice | None = None
        self._chosen_for: weakref.ref[pl.LightningModule] | None = None
        self._first_steps: FirstSteps | None = None
        self._is_choosing = False

    def __getstate__(self) -> dict[str, Any]:
        """Leave the module and what is measured behind."""
        return {**super().__getstate__(), "_chosen_for": None, "_first_steps": None}

    def _counts(self) -> tuple[int, int]:
        """Return the number of devices, and that of a node."""
        return self.processes.num_nodes * self.processes.num_local, self.processes.num_local

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Those of one replica while the data are looked at, as the number is not known."""
        if self._is_choosing:
            # A sampler that divides would otherwise divide by sizes that are not known.
            return {"num_replicas": 1, "rank": 0}
        return super().distributed_sampler_kwargs

    @override
    def _preflight(self, trainer: pl.Trainer | None, model: Any) -> None:
        """Refuse what no layout allows before any other process starts."""
        if trainer is not None and isinstance(model, pl.LightningModule):
            check_trainer(trainer, model, ParallelSizes(data_shard=self._counts()[0]))

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        module = self.lightning_module
        trainer = None if module is None else trainer_of(module)
        # Resuming reads before `setup`.
        if trainer is not None:  # what a rank reads depends on the layout
            self._choose_once(trainer)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        self._choose_once(trainer)
        super().setup(trainer)

    def _choose_once(self, trainer: pl.Trainer) -> None:
        module = self.lightning_module
        assert module is not None
        chosen_for = None if self._chosen_for is None else self._chosen_for()
        if chosen_for is not module and not self._on_mesh(module):
            self._choose(trainer, module)

    def _choose(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        devices, node = self._counts()
        # What the last choice added is free again; what the user gave is not.
        own = self.choice is not None and self.choice.recomputes(self.options)
        given = {**self._given, **({"recomputation": None} if own else {})}
        chooser = LayoutChooser(
            trainer=trainer,
            module=module,
            options=replace(self.options, **given),
            wish=self._wish,
            device=self.root_device,
            devices=devices,
            node=node,
        )
        self._is_choosing = True
        try:
            with one_speaks(self.processes):
                chosen = chooser.choose()
            # All ranks chose, and would choose alike; the broadcast makes it certain, since other
            # sizes on one rank would hang.
            self.choice = self.processes.broadcast(chosen)
        finally:
            self._is_choosing = False
        assert self.choice is not None
        self.options = chooser.settings(self.choice.layout)
        # Before anything is built on a mesh.
        self.processes.choose(self.choice.layout.sizes)
        self._chosen_for = weakref.ref(module)
        rank_zero_info(str(self.choice))
        # Manual optimization has steps of the user's, which are not the planner's.
        checks = trainer.state.fn == TrainerFn.FITTING and module.automatic_optimization
        if checks and self.choice.predicted is not None:
            counts = self.options.compile_blocks is False
            self._first_steps = FirstSteps(self.choice, self.root_device, counts=counts)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._first_steps is not None:
            assert self.lightning_module is not None
            self._first_steps.begin(self.lightning_module.trainer)
        return super().training_step(*args, **kwargs)

    @override
    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **options: Any
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **options)
        if self._first_steps is not None:
            self._first_steps.end()
            if self._first_steps.is_over:
                self._first_steps = None
        return output

    @override
    def on_exception(self, exception: BaseException) -> None:
        self._drop_first_steps()
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._drop_first_steps()
        super().teardown()

    def _drop_first_steps(self) -> None:
        if self._first_steps is not None:
            self._first_steps.close()
            self._first_steps = None
