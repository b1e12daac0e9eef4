"""`ActivationCheckpointing`: recompute activations in the backward instead of storing them."""

from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from lightning_par.engine.activations.checkpointing import (
    Mode,
    MODES,
    Recomputation,
    resolve_operations,
)
from lightning_par.errors import ConfigurationError, either, raise_problems
from lightning_par.inference.lookup import find_plan
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.plan.resolved_plan import resolve_plan
from lightning_par.strategies.mesh_strategy import MeshStrategy
from lightning_par.strategies.setup.block_wrapping import (
    check_recomputation,
    offload_blocks,
    recompute_blocks,
)

__all__ = ["ActivationCheckpointing"]


class ActivationCheckpointing(pl.Callback):
    """Activation checkpointing of the model's blocks: full, selective, or different per stage.

    Results are bitwise equal where the operations are deterministic, dropout included. The blocks
    are those of the plan. Where no plan names any, they are the entries of the list with most
    parameters, an `nn.ModuleList` or `nn.Sequential`, whose entries are of one class. Works under
    every strategy and schedule, with ``compile_blocks``, and under Lightning's own strategies.

    Args:
        mode: ``"full"`` keeps only the input of a block; ``"selective"`` also the outputs of
            operations that are costly to recompute; ``"none"`` keeps all activations.
        every: Checkpoint every `every`-th block, beginning with the first; 1 or more.
        operations: Under ``"selective"``, the operations whose outputs are kept, such as
            ``["mm", "aten._scaled_dot_product_flash_attention"]``. None: matrix products and
            attention, but not the scores of an attention without a fused kernel.
        parts: Under ``"selective"``, instead of `operations`: the modules inside a block that are
            recomputed, as in ``["attention"]``; the activations of the rest are kept. ``"plan"``:
            the modules that the plan lists as checkpointable.
        offload: ``"cpu"``: kept activations of a CUDA device are moved to pinned host memory until
            the backward. Tensors below 1 MiB stay.
        per_stage: A mode for every pipeline stage instead of `mode`; or ``"auto"``: every stage
            recomputes as little as it can without needing more memory than the fullest stage does
            under `mode`. Later stages hold fewer micro-batches in flight, hence recompute less.

    Raises:
        ConfigurationError: A value is out of range or contradicts another one; with every problem.

    Examples:
        >>> trainer = L.Trainer(callbacks=[ActivationCheckpointing("full", every=2)])
    """

    def __init__(
        self,
        mode: Mode = "selective",
        *,
        every: int = 1,
        operations: Sequence[str] | None = None,
        parts: Sequence[str] | Literal["plan"] | None = None,
        offload: Literal["cpu"] | None = None,
        per_stage: Sequence[Mode] | Literal["auto"] | None = None,
    ) -> None:
        problems = _value_problems(mode, every, offload, per_stage)
        problems += _selection_problems(mode, operations, parts, per_stage)
        names, unknown = resolve_operations(operations or ())
        problems += [
            f"operations= names {name!r}, but torch has no operation of that name. Write names "
            "such as 'mm' or 'aten.mm.default'"
            for name in unknown
        ]
        raise_problems(ConfigurationError, "LP902", problems)
        chosen = tuple(parts) if parts is not None and not isinstance(parts, str) else parts
        listed = per_stage is None or isinstance(per_stage, str)
        self.recomputation = Recomputation(
            mode=mode,
            operations=None if operations is None else names,
            parts=chosen,  # type: ignore[arg-type]
            every=every,
            on_host=offload == "cpu",
            stage_modes=per_stage if listed else tuple(per_stage),  # type: ignore[arg-type]
        )
        self._wrapped: pl.LightningModule | None = None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Hand the options to the strategy, which wraps the blocks when it sets up the model."""
        if isinstance(trainer.strategy, MeshStrategy):
            trainer.strategy.change_options(recomputation=self.recomputation)

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Wrap the blocks under one of Lightning's own strategies."""
        # fit() may be called again with the same module: never wrap twice.
        if isinstance(trainer.strategy, MeshStrategy) or self._wrapped is pl_module:
            return
        what, plan = self.recomputation, find_plan(pl_module) or ParallelPlan()
        resolved = resolve_plan(pl_module, plan)
        check_recomputation(pl_module, resolved, what, 1)
        # Without a pipeline there is one stage, which holds all blocks.
        mode = what.stage_modes[0] if isinstance(what.stage_modes, tuple) else what.mode
        recompute_blocks(pl_module, resolved, what, [(0, len(resolved.block_names))], [mode])
        offload_blocks(pl_module, resolved, what)
        self._wrapped = pl_module


def _value_problems(mode: Any, every: Any, offload: Any, per_stage: Any) -> list[str]:
    valid = either([repr(m) for m in MODES])
    problems = []
    if mode not in MODES:
        problems.append(f"mode={mode!r} must be {valid}.")
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        problems.append(f"every={every!r} must be a whole number of 1 or more.")
    if offload not in (None, "cpu"):
        problems.append(f"offload={offload!r} must be 'cpu' or None.")
    listed = isinstance(per_stage, Sequence) and not isinstance(per_stage, str)
    if per_stage not in (None, "auto") and not (listed and all(m in MODES for m in per_stage)):
        problems.append(
            f"per_stage={per_stage!r} must be 'auto', or a list with {valid} for each stage."
        )
    return problems


def _selection_problems(mode: Any, operations: Any, parts: Any, per_stage: Any) -> list[str]:
    problems = []
    if operations is not None and parts is not None:
        problems.append(
            "operations= (whose outputs are kept) and parts= (which are recomputed) cannot be used "
            "together. Pass only one of them."
        )
    if isinstance(operations, str):
        problems.append(f"operations={operations!r} must be a list, as in [{operations!r}].")
    if isinstance(parts, str) and parts != "plan":
        problems.append(f"parts={parts!r} must be a list, as in [{parts!r}], or 'plan'.")
    selects = mode == "selective" or "selective" in (per_stage or ())
    for name, value in (("operations", operations), ("parts", parts)):
        if value is not None and not selects:
            problems.append(f"{name}= needs mode='selective', but mode is {mode!r}.")
    return problems
