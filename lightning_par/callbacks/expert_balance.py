"""`ExpertBalance`: monitor of the expert load of every mixture-of-experts layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import nn
from typing_extensions import override

from lightning_par.callbacks.last_picture import last_picture
from lightning_par.errors import ConfigurationError
from lightning_par.models.mixtral.moe import Router
from lightning_par.profiling.expert_load_plot import draw_expert_load
from lightning_par.strategies import MeshStrategy

__all__ = ["ExpertBalance", "LayerLoad"]


@dataclass(frozen=True, kw_only=True)
class LayerLoad:
    """Expert load of one layer since the last report, summed over all replicas.

    Attributes:
        load: Token assignments per expert, dropped ones included.
        dropped: Number of assignments that were dropped.
        z: Mean over the tokens of the squared log-sum-exp of the router's logits.
    """

    load: tuple[float, ...]
    dropped: float
    z: float

    def measures(self) -> dict[str, float]:
        """Return the logged values of a layer by the last part of their keys."""
        loads = torch.tensor(self.load, dtype=torch.float64)
        shares = loads / loads.sum().clamp(min=1)
        largest = torch.tensor(float(len(loads))).log().clamp(min=1e-12)
        entropy = torch.special.entr(shares).sum() / largest if len(loads) > 1 else shares.sum()
        values = {
            "entropy": float(entropy),
            "max_over_mean": float(shares.max() * len(loads)),
            "dropped": float(self.dropped / loads.sum().clamp(min=1)),
            "z": self.z,
        }
        return values | {f"load_{e}": share for e, share in enumerate(shares.tolist())}


class ExpertBalance(Callback):
    """Monitor that logs the expert load of every layer, and draws it at the end.

    Logged at the Trainer's ``log_every_n_steps``, the same on every rank, over the steps since the
    last report, all their micro-batches and all replicas; i is the index of the layer:

    - ``experts/layer_i/load_e``: fraction of the assignments that chose expert e
    - ``experts/layer_i/entropy``: entropy of the load, 0 (one expert has all) to 1 (balanced)
    - ``experts/layer_i/max_over_mean``: load of the fullest expert over the mean load
    - ``experts/layer_i/dropped``: fraction of the assignments beyond the capacity
    - ``experts/layer_i/z``: mean squared log-sum-exp of the router's logits
    - ``experts/entropy`` and so on: mean over the layers; maximum for ``max_over_mean``

    At the end of training rank 0 draws ``expert_balance.png``, layers and experts over time.

    Args:
        path: File of the picture (.png, .svg or .pdf); None: ``expert_balance.png`` in the folder
            of the Trainer's logger.

    Raises:
        ConfigurationError: At the start of training, if no rank has a `Router`.

    **Communicates**: an all-gather over ``pp`` of the loads, at every logged step. Counting costs a
    few sums per layer, which the routers reduce over the replicas anyway.

    Examples:
        >>> trainer = L.Trainer(callbacks=[ExpertBalance("load.svg")])
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.steps: list[int] = []
        self.history: list[dict[str, LayerLoad]] = []

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise if no pipeline stage has a router, and reset the records."""
        if not any(_gather(trainer, len(_routers(pl_module)))):
            raise ConfigurationError(
                "LP917",
                "the callback ExpertBalance needs a Router of lightning_par.models, but "
                f"{type(pl_module).__name__} has none. Remove the callback, or train a "
                "MixtralModule.",
            )
        for router in _routers(pl_module).values():
            router.record = None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any
    ) -> None:
        """Log the loads at every `log_every_n_steps`-th optimizer step."""
        # With gradient accumulation several batches end at the same step: report once.
        step, every = trainer.global_step, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and step and step % every == 0 and self.steps[-1:] != [step]:
            self._report(trainer, pl_module)

    def _report(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        found = {}
        for name, router in _routers(module).items():
            if router.record is not None:
                found[name] = _read(router)
                router.record = None
        layers: dict[str, LayerLoad] = {}
        for part in _gather(trainer, found):
            layers |= part
        ordered = dict(sorted(layers.items(), key=lambda item: _number(item[0])))
        self.steps.append(trainer.global_step)
        self.history.append(ordered)
        values = _values(ordered)
        trainer.callback_metrics.update({k: torch.tensor(v) for k, v in values.items()})
        for logger in trainer.loggers:
            logger.log_metrics(values, step=trainer.global_step)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Draw the reported loads."""
        draws = bool(self.steps) and trainer.is_global_zero
        path = last_picture(trainer, self.path, "expert_balance.png", draws=draws)
        if path is None:
            return
        loads = {
            name.replace("_", " "): [list(layers[name].load) for layers in self.history]
            for name in self.history[0]
        }
        draw_expert_load(loads, self.steps, path, title="Load of the experts")


def _routers(module: nn.Module) -> dict[str, Router]:
    """Return the routers of this rank: name of the layer -> router."""
    named = {n: m for n, m in module.named_modules() if isinstance(m, Router)}
    return {_layer(name): router for name, router in named.items()}


def _layer(fqn: str) -> str:
    """Return ``layer_3`` for ``model.blocks.3.moe.router``; the FQN if it has no number."""
    number = next((part for part in fqn.split(".") if part.isdecimal()), None)
    return fqn if number is None else f"layer_{number}"


def _number(layer: str) -> tuple[int, str]:
    """Return a sort key that puts layer_10 behind layer_9."""
    digits = layer.rpartition("_")[2]
    return (int(digits) if digits.isdecimal() else -1, layer)


def _read(router: Router) -> LayerLoad:
    record = router.record
    assert record is not None
    return LayerLoad(
        load=tuple(record.load.tolist()),
        dropped=float(record.dropped),
        z=float(record.z / record.tokens.clamp(min=1)),
    )


def _gather(trainer: pl.Trainer, value: Any) -> list[Any]:
    """Return the values of all pipeline ranks, in their order; on every rank."""
    strategy = trainer.strategy
    if not isinstance(strategy, MeshStrategy) or strategy.sizes.pipeline == 1:
        return [value]
    parts: list[Any] = [None] * strategy.sizes.pipeline
    dist.all_gather_object(parts, value, group=strategy.mesh.group("pp"))
    return parts


def _values(layers: Mapping[str, LayerLoad]) -> dict[str, float]:
    """Return the logged values of all layers and their summary, by key."""
    each = {name: layer.measures() for name, layer in layers.items()}
    values = {f"experts/{n}/{k}": v for n, found in each.items() for k, v in found.items()}
    for key in ("entropy", "max_over_mean", "dropped", "z"):
        of_layers = [found[key] for found in each.values()]
        whole = max(of_layers) if key == "max_over_mean" else sum(of_layers) / len(of_layers)
        values[f"experts/{key}"] = whole
    return values
