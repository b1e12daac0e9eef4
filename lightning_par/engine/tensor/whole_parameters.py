"""Whole parameters that another module reads, and errors of shards that one should not read.

A module's own parameters stand for local tensors inside its forward. A model may also read those of
a module inside, as in ``F.linear(x, self.dense.weight)``, or of one elsewhere.
"""

import re
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import DTensor, Placement, Shard

from lightning_par.engine.pipeline.stage import StageStub
from lightning_par.engine.tensor.styles import local_parameter
from lightning_par.engine.wrapping import Forward, wrap_forward
from lightning_par.errors import PlanError
from lightning_par.plan.resolved_plan import ResolvedPlan

__all__ = [
    "BLOCK_CALLS",
    "explain_shards",
    "failing_module",
    "holds_tensor_shards",
    "read_whole_parameters",
]

BLOCK_CALLS = (
    "ZeRO gathers the weights of a block only when the block is called as block(x). Here the code "
    "called block.forward(x), or it used a weight of a block outside of this block. Call the block "
    "as block(x), and use its weights only inside of its forward; or use zero_stage=0"
)
"""Why a weight is still a shard under ZeRO, and what to write."""


def read_whole_parameters(
    model: nn.Module, resolved: ResolvedPlan, placements: Mapping[str, Placement]
) -> None:
    """Let the forward of every block, and of the model around them, read the whole parameters of
    modules inside as local tensors.

    Args:
        model: Changed in place. Modules of other pipeline stages may be missing.
        resolved: The resolved plan.
        placements: How every parameter is placed.
    """
    hosts = [*resolved.block_names, *(name for name, _ in model.named_children())]
    modules = {n: m for n, m in model.named_modules() if not isinstance(m, StageStub)}
    # Placed as whole on the tp axis: shards are never read by another module's code.
    left = {fqn for fqn, placement in placements.items() if not isinstance(placement, Shard)}
    if resolved.plan.sequence_region != "none":  # a module that a pattern misses is to be told
        styles = resolved.styles
        left = {fqn for fqn in left if styles.get(fqn.rpartition(".")[0]) == "replicated"}
    for host in hosts:
        inside = {fqn for fqn in left if fqn.startswith(host + ".")}
        # Blocks come first: a parameter is swapped by its block, or else by the child of the
        # model that holds it.
        left -= inside
        owners = [fqn.rpartition(".") for fqn in sorted(inside)]
        found = [(modules[owner], name) for owner, _, name in owners if owner in modules]
        if host in modules and found:
            wrap_forward(modules[host], _reader(found), "whole_parameters")


def _reader(found: list[tuple[nn.Module, str]]) -> Any:
    def around(inner: Forward) -> Forward:
        def forward(*args: Any, **kwargs: Any) -> Any:
            swapped = []
            try:
                for owner, name in found:
                    whole: Any = owner._parameters[name]
                    # With more axes it is a shard of a replica, which is gathered later.
                    if isinstance(whole, DTensor) and whole.device_mesh.ndim == 1:
                        swapped.append((owner, name, whole))
                        owner._parameters[name] = cast(nn.Parameter, local_parameter(whole))
                return inner(*args, **kwargs)
            finally:
                for owner, name, whole in swapped:
                    owner._parameters[name] = whole

        return forward

    return around


_SIGNS = re.compile(
    "shape '.*' is invalid for input|shapes cannot be multiplied"
    "|must match the size of tensor|expected .* to have .* channels|normalized_shape"
    "|expected scalar type .* DTensor|to match target batch_size|Expected target size"
)


_CURES = {
    "is invalid for input": (
        "After 'colwise' layers a rank has only its share of the heads. Write view(b, t, "
        "self.heads, -1) with the attribute heads named in ParallelPlan(divided=...), and "
        "reshape(b, t, -1) to join the heads again"
    ),
    "must match the size of tensor": (
        "Under sequence parallelism a rank has only its part of the tokens between blocks. Give a "
        "module with the style 'split_sequence' position ids of shape [1, T]. Code that needs all "
        "tokens, such as pooling or a mask, has to run after a module with the style "
        "'sequence_gather_output' or inside one with 'gather_sequence'"
    ),
    "target": (
        "Under sequence parallelism a rank has only its part of the tokens between blocks. Give "
        "the head the style 'vocab_head', or the module before it the style "
        "'sequence_gather_output', so that the logits have as many tokens as the labels"
    ),
    "shapes cannot be multiplied": (
        "The style 'vocab_head' is for a head that computes logits for every token; give a head "
        "that follows pooling the style 'replicated'"
    ),
}
"""What torch says -> what mostly leads to it, and its cure."""

_MOST_LAYERS = 8
"""That an error lists."""

_IN_PLACE = "_ToTorchTensor is a view and its base or another view of its base has been modified"


def explain_shards(model: nn.Module, error: Exception) -> PlanError | None:
    """Return which module failed, and which style to give, where a shard met what wants it whole.

    Args:
        model: The user's module.
        error: What its step raised.

    Returns:
        None if no parameter is sharded, or if torch says something else.
    """
    if _IN_PLACE in str(error):
        name, module = failing_module(model, error.__traceback__)
        return PlanError(
            "LP207",
            f"{name or 'the step'} ({type(module).__name__}) changes its weight in place in its "
            "forward, as an embedding with max_norm does, but this rank may hold only a shard of "
            "the weight. Change the weight in on_train_batch_end (to replace max_norm, by "
            "torch.renorm), or use tensor_parallel_size=1.",
        )
    if not _SIGNS.search(str(error)) or not any(isinstance(p, DTensor) for p in model.parameters()):
        return None
    name, module = failing_module(model, error.__traceback__)
    where = f"{name} ({type(module).__name__})" if name else "the step"
    if not holds_tensor_shards(model):
        # Only then is the error about shards.
        if not any(isinstance(p, DTensor) for p in module.parameters(recurse=False)):
            return None  # an error of the user's own code, which met no shard
        return PlanError(
            "LP208",
            f"{where} computes with weights that are still sharded over the replicas: "
            f"{str(error).strip().rstrip('.')}.\nWhy: {BLOCK_CALLS}.",
        )
    said = str(error).strip().rstrip(".")
    cures = [cure for sign, cure in _CURES.items() if sign in said]
    cures.append(
        "Give a layer whose weight or output is read by code outside of it the style 'replicated' "
        "or 'colwise_gather_output' in ParallelPlan(tensor=...), and name attributes that hold a "
        "number of heads in ParallelPlan(divided=...)"
    )
    return PlanError(
        "LP207",
        f"{where} failed while it computed with shards of its weights or of its input: "
        f"{said}.\nWhy: if the same model runs on one process, the tensor styles of its layers do "
        "not fit each other or the code of the forward. The layers are "
        f"{_layers_around(model, name)}.\nWhat to write: {'. '.join(cures)}. Or use "
        "tensor_parallel_size=1.",
    )


def failing_module(model: nn.Module, trace: TracebackType | None) -> tuple[str, nn.Module]:
    """Return the innermost module of a model that was at work where an exception was raised, and
    its FQN; the model itself if none was.

    Args:
        model: The user's module.
        trace: Traceback of the exception.
    """
    names = {id(module): name for name, module in model.named_modules()}
    callers = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(trace)]
    # The innermost frame last: its `self` is the module that was computing.
    inside = [m for m in callers if isinstance(m, nn.Module) and names.get(id(m))]
    return (names[id(inside[-1])], inside[-1]) if inside else ("", model)


def _layers_around(model: nn.Module, name: str) -> str:
    """List the layers of a module's parent, and whether tensor parallelism divides them."""
    parent = name.rpartition(".")[0]
    layers: dict[str, bool] = {}
    for fqn, parameter in (model.get_submodule(parent) if parent else model).named_parameters():
        layer = f"{parent}.{fqn}".strip(".").rpartition(".")[0]
        layers[layer] = layers.get(layer, False) or _is_divided(parameter)
    told = [f"{layer} ({'divided' if d else 'whole'})" for layer, d in layers.items()]
    return ", ".join(told[:_MOST_LAYERS]) + (", ..." if len(told) > _MOST_LAYERS else "")


def _is_divided(parameter: nn.Parameter) -> bool:
    """Whether tensor parallelism divides a parameter."""
    if not isinstance(parameter, DTensor):
        return False
    axes = parameter.device_mesh.mesh_dim_names or ()
    return "tp" in axes and isinstance(parameter.placements[axes.index("tp")], Shard)


def holds_tensor_shards(model: nn.Module) -> bool:
    """Return whether tensor parallelism holds a parameter of the model on this rank."""
    return any(
        isinstance(p, DTensor) and "tp" in (p.device_mesh.mesh_dim_names or ())
        for p in model.parameters()
    )
