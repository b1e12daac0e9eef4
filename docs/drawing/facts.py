"""What the pictures show, asked of the engine: a real GPT, cut and counted in one process.

Traffic is counted by the engine's own `CommVolume` on a process group that moves nothing, so
that one process can play rank 0 of two; the values that it computes mean nothing, the calls and the
bytes do. B batch, T tokens, D model dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from lightning_par.engine.data.fsdp import shard_model, Sharding
from lightning_par.engine.init.deferred_init import record_construction
from lightning_par.engine.init.materialize import Materializer
from lightning_par.engine.pipeline.module_split import cut_stages
from lightning_par.engine.pipeline.stage import StageStub
from lightning_par.engine.tensor.apply import apply_tensor_parallel
from lightning_par.mesh import build_mesh, ParallelMesh
from lightning_par.models import GPT, GPTConfig
from lightning_par.plan.resolved_plan import balance_blocks, resolve_plan, ResolvedPlan
from lightning_par.profiling.comm_volume import CommVolume
from lightning_par.sizes import ParallelSizes

__all__ = [
    "BATCH",
    "TOKENS",
    "ZeroFacts",
    "activation_shapes",
    "initial_values",
    "parameters_per_rank",
    "stage_modules",
    "tiny_gpt",
    "zero_facts",
]

BATCH, TOKENS, MICRO_BATCHES = 2, 8, 2


def tiny_gpt(**overrides: Any) -> tuple[GPT, ResolvedPlan, Any]:
    """The smallest reference model on the meta device, its resolved plan, and how it begins."""
    with record_construction() as record:
        model = GPT(GPTConfig.preset("tiny", **overrides))
    return model, resolve_plan(model, model.parallel_plan()), record


def two_ranks(sizes: ParallelSizes) -> ParallelMesh:
    """A mesh of two ranks of which this process is rank 0 and the other one does not exist."""
    if not dist.is_initialized():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return build_mesh(sizes, "cpu")


def put_on(mesh: ParallelMesh, *, zero_stage: int = 1) -> tuple[GPT, ResolvedPlan, Sharding]:
    """The smallest model as rank 0 of `mesh` holds it."""
    model, resolved, record = tiny_gpt()
    tensor = None
    if mesh.sizes.tensor > 1:
        axis = mesh.device_mesh["tp"]
        tensor = apply_tensor_parallel(model, resolved, axis, sequence_parallel=True)
    materializer = Materializer(
        canonical=resolved.canonical,
        record=record,
        seed=0,
        device=torch.device("cpu"),
        tensor=tensor,
    )
    give = materializer.materialize
    return (
        model,
        resolved,
        shard_model(model, resolved, mesh, zero_stage=zero_stage, materialize=give),
    )


def parameters_per_rank(sizes: ParallelSizes) -> list[int]:
    """How many parameters every rank of a pp x dp x tp 2 mesh computes with."""
    model, resolved, _ = tiny_gpt()
    shapes = dict(model.named_parameters(remove_duplicate=False))
    axis = two_ranks(ParallelSizes(tensor=2)).device_mesh["tp"]
    places = apply_tensor_parallel(model, resolved, axis, sequence_parallel=True).placements
    bounds = balance_blocks(resolved, sizes.pipeline)
    counts = []
    for rank in range(sizes.world_size):
        stage = sizes.coordinates(rank)["pp"]
        held: dict[str, int] = {}
        for name, parameter in shapes.items():
            if stage in resolved.stages_of(name, bounds):
                parts = sizes.tensor if isinstance(places[name], Shard) else 1
                held[resolved.canonical[name]] = parameter.numel() // parts
        counts.append(sum(held.values()))
    return counts


def stage_modules(index: int, num_stages: int, names: list[str]) -> Mapping[str, str]:
    """Name of a module -> "here", or the kind of stub that stands for it on a stage."""
    model, resolved, _ = tiny_gpt()
    cut_stages(model, resolved, [index], balance_blocks(resolved, num_stages))
    found = {}
    for name in names:
        kind = type(model.get_submodule(name))
        # The stub of an earlier block is of a class made of the engine's and the block's.
        ours = [c for c in kind.__mro__ if c.__module__.startswith("lightning_par.engine.")]
        bases = ("StageStub", "_Shape")
        ours = [c for c in ours if c.__name__ not in bases]
        named = [c.__name__.strip("_").removesuffix("Module") for c in ours]
        found[name] = named[-1] if issubclass(kind, StageStub) else "here"
    return found


def run_step(model: nn.Module, sharding: Sharding, micro_batches: int) -> None:
    """Forward and backward of every micro-batch of one step."""
    ids = torch.zeros(BATCH, TOKENS, dtype=torch.long)

    def loss() -> Tensor:
        return F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())

    for number in range(micro_batches):
        value = sharding.call(loss)
        sharding.before_backward(is_last=number == micro_batches - 1)
        value.backward()


def activation_shapes() -> tuple[dict[str, tuple[int, ...]], CommVolume]:
    """Shapes into and out of the modules of a block on one of two tensor-parallel ranks, and what
    the block's forward moved.
    """
    mesh = two_ranks(ParallelSizes(tensor=2))
    model, _, _ = put_on(mesh)
    block, shapes = model.blocks[0], {}

    def watch(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            shapes[f"{name}.in"], shapes[f"{name}.out"] = (
                tuple(inputs[0].shape),
                tuple(output.shape),
            )

        module.register_forward_hook(hook)

    for name, module in block.named_modules():
        if name and not isinstance(module, nn.Dropout):
            watch(name, module)
    hidden = torch.zeros(BATCH, TOKENS // 2, model.config.model_dim)
    assert model.rotary is not None
    rotary = model.rotary(torch.arange(TOKENS)[None])
    with CommVolume(mesh.named_groups()) as volume:
        block(hidden, rotary)
    return shapes, volume


@dataclass(frozen=True, kw_only=True)
class ZeroFacts:
    """What a step of two micro-batches moves at one ZeRO stage, on two ranks.

    Attributes:
        held: Share of the parameters that a rank keeps between the steps.
        sent: Operation -> bytes that a rank sends, over the bytes of all parameters.
    """

    held: float
    sent: Mapping[str, float]


def zero_facts(zero_stage: int) -> ZeroFacts:
    """Count the second step of the smallest model at a ZeRO stage."""
    sizes = ParallelSizes(data_replicate=2) if zero_stage == 0 else ParallelSizes(data_shard=2)
    model, _, sharding = put_on(two_ranks(sizes), zero_stage=zero_stage)
    run_step(model, sharding, MICRO_BATCHES)
    with CommVolume() as volume:
        run_step(model, sharding, MICRO_BATCHES)
    sharding.release()
    local = sum(p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor))
    whole = model.num_parameters
    sent = {entry.operation: entry.sent / (4 * whole) for entry in volume.entries()}
    return ZeroFacts(held=local / whole, sent=sent)


def initial_values(name: str, seed: int, **overrides: Any) -> Tensor:
    """The initial values of one parameter, as every layout makes them."""
    model, _, record = tiny_gpt(**overrides)
    parameter = model.get_parameter(name)
    value: Tensor = record.initialize(parameter, name=name, seed=seed, device="cpu")
    return value
