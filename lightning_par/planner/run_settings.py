"""A layout as the settings of ``lightning-par fit``."""

import copy
from collections.abc import Mapping
from typing import Any

from lightning_par.planner.shapes import Layout

__all__ = ["apply_layout", "strategy_settings"]

_RECOMPUTES = "lightning_par.callbacks.ActivationCheckpointing"


def strategy_settings(layout: Layout) -> dict[str, Any]:
    """Return the arguments of `Hybrid3DStrategy` that make a layout."""
    sizes = layout.sizes
    chosen: dict[str, Any] = {
        "tensor_parallel_size": sizes.tensor,
        "pipeline_parallel_size": sizes.pipeline,
        "context_parallel_size": sizes.context,
        "data_parallel_size": sizes.data,
        "zero_stage": layout.zero_stage,
    }
    if sizes.expert > 1:
        chosen["expert_parallel_size"] = sizes.expert
        if layout.expert_max_rows is not None:
            chosen["expert_max_rows"] = layout.expert_max_rows
    if sizes.data_replicate > 1 and layout.zero_stage > 0:
        chosen["data_parallel_replicate_size"] = sizes.data_replicate
    if not layout.sequence_parallel:
        chosen["sequence_parallel"] = False
    if sizes.pipeline > 1:
        chosen |= {"schedule": layout.schedule, "num_microbatches": layout.microbatches}
        if layout.in_rounds:
            chosen["virtual_pipeline_size"] = layout.stages_per_rank
        if layout.blocks:
            chosen["stage_blocks"] = list(layout.blocks)
    if layout.offload:
        chosen["offload_options"] = {"offload_optimizer": True}
    return chosen


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
            "init_args": strategy_settings(layout),
        },
        "accumulate_grad_batches": 1 if pipelined else layout.microbatches,
    }
    given = trainer.get("callbacks") or []
    others = [
        c for c in given if not str(c.get("class_path", "")).endswith("ActivationCheckpointing")
    ]
    if layout.recompute != "none":
        others.append({"class_path": _RECOMPUTES, "init_args": {"mode": layout.recompute}})
    if others or given:
        trainer["callbacks"] = others
    data = found.setdefault("data", {"class_path": "lightning_par.models.TextDataModule"})
    batch = layout.micro_batch * (layout.microbatches if pipelined else 1)
    data.setdefault("init_args", {})["batch_size"] = batch
    return found
