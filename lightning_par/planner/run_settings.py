"""A layout as the settings of ``lightning-par fit``."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_par.planner.shapes import Layout

__all__ = ["apply_layout", "without_layout"]

_RECOMPUTES = "lightning_par.callbacks.ActivationCheckpointing"
_SET = ("accelerator", "accumulate_grad_batches", "devices", "num_nodes", "strategy")
_NAMES = *(f"trainer.{name}" for name in _SET), "data.batch_size", "data.init_args.batch_size"
"""What `apply_layout` sets, as the command line names it."""


def apply_layout(
    settings: Mapping[str, Any],
    layout: Layout,
    *,
    nodes: int,
    devices: int,
    accelerator: str = "auto",
) -> dict[str, Any]:
    """Return the settings of a run with its layout in place of the user's.

    Args:
        settings: As read from the YAML file that ``fit --config`` takes.
        layout: The layout.
        nodes: ``trainer.num_nodes``.
        devices: ``trainer.devices``, of each node.
        accelerator: ``trainer.accelerator``, that of the machine which the layout is for.

    Returns:
        A copy, in which a replica's batch is ``data.init_args.batch_size`` and, without a pipeline,
        micro-batches are ``trainer.accumulate_grad_batches``.
    """
    found: dict[str, Any] = copy.deepcopy(dict(settings))
    trainer = found.setdefault("trainer", {})
    pipelined = layout.sizes.pipeline > 1
    trainer |= {
        "accelerator": accelerator,
        "num_nodes": nodes,
        "devices": devices,
        "strategy": {
            "class_path": "lightning_par.Hybrid3DStrategy",
            "init_args": layout.options(),
        },
        # Without a pipeline, micro-batches are batches whose gradients accumulate.
        "accumulate_grad_batches": 1 if pipelined else layout.microbatches,
    }
    # The layout decides about recomputation: the user's own callback would contradict it.
    given = trainer.get("callbacks") or []
    others = [
        c for c in given if not str(c.get("class_path", "")).endswith("ActivationCheckpointing")
    ]
    if layout.recompute != "none":
        others.append({"class_path": _RECOMPUTES, "init_args": {"mode": layout.recompute}})
    if others or given:
        trainer["callbacks"] = others
    data = found.setdefault("data", {"class_path": "lightning_par.models.TextDataModule"})
    # The loader gives what a replica gets at once; a pipeline cuts it.
    batch = layout.micro_batch * (layout.microbatches if pipelined else 1)
    data.setdefault("init_args", {})["batch_size"] = batch
    return found


def without_layout(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of ``lightning-par fit`` that do not change what `apply_layout` sets.

    Args:
        arguments: Such as ``--trainer.strategy=hybrid3d``, which would bring its own sizes back.
    """
    kept, is_kept = [], True
    for word in arguments:
        if word.startswith("--"):
            name = word[2:].partition("=")[0]
            is_kept = not any(name == one or name.startswith(f"{one}.") for one in _NAMES)
        if is_kept:
            kept.append(word)
    return kept
