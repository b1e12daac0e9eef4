"""`torch.compile` of the blocks and of the layers beside them; CUDA graphs and asynchronous tensor
parallelism are options.

Asynchronous tensor parallelism: the compiler cuts the products beside an all-gather or a
reduce-scatter into pieces and sends each as soon as it is there, by copies between the memories of
the devices (symmetric memory).

**Source**: Wang et al., Overlap communication with dependent computation via decomposition in large
deep learning models (ASPLOS 2023).
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_par.checkpoint.progress import counted
from lightning_par.engine.pipeline.stage import StageStub
from lightning_par.engine.wrapping import Forward, wrap_forward
from lightning_par.errors import ConfigurationError, raise_problems
from lightning_par.mesh import ParallelMesh
from lightning_par.plan.resolved_plan import ResolvedPlan
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.options import MeshOptions
from lightning_par.upstream.distributed import use_symmetric_memory

__all__ = ["check_compiled", "compile_blocks", "layers_beside"]

_ASYNC = "_micro_pipeline_tp"
"""Of `torch._inductor.config`, and thereby a key of ``torch.compile(options=...)``."""


def check_compiled(
    options: MeshOptions,
    resolved: ResolvedPlan,
    sizes: ParallelSizes,
    device: torch.device,
    *,
    accumulates: bool = False,
) -> None:
    """Refuse what blocks cannot be compiled with.

    Args:
        options: The options of the strategy.
        resolved: The resolved plan.
        sizes: Sizes of the mesh.
        device: Of this process.
        accumulates: Whether several batches make a step.

    Raises:
        ConfigurationError: With every problem.
    """
    problems, given = [], options.compiler
    if options.async_tensor_parallel:
        asked = "async_tensor_parallel=True needs"
        if options.compile_blocks is False:
            problems.append(
                f"{asked} compile_blocks=True, since torch.compile splits the matrix products into "
                "parts that overlap with communication."
            )
        if given.get("backend", "inductor") != "inductor":
            problems.append(
                f"{asked} the backend 'inductor' of torch.compile, not {given['backend']!r}."
            )
        if "mode" in given:
            problems.append(
                f"{asked} compile_blocks={{'options': ...}} instead of mode={given['mode']!r}, "
                "since torch.compile accepts only one of the two. "
                f"torch._inductor.list_mode_options({given['mode']!r}) returns the options of "
                "this mode."
            )
        if not options.sequence_parallel or resolved.plan.sequence_region == "none":
            problems.append(
                f"{asked} sequence parallelism, since it overlaps the all-gathers and "
                "reduce-scatters of sequence parallelism with computation. Remove "
                "sequence_parallel=False from the strategy, and sequence_region='none' from the "
                "plan."
            )
        if device.type != "cuda":
            problems.append(f"{asked} GPUs, but the Trainer runs on {device.type}.")
    if options.records_graphs and device.type == "cuda":
        problems += _graph_problems(options, sizes, accumulates=accumulates)
    raise_problems(ConfigurationError, "LP916", problems)


def _graph_problems(
    options: MeshOptions, sizes: ParallelSizes, *, accumulates: bool
) -> Iterator[str]:
    asked = f"compile_blocks={options.compile_blocks!r} records CUDA graphs"
    instead = "a mode without CUDA graphs, such as 'max-autotune-no-cudagraphs'."
    if _gathers_parameters(options, sizes):
        yield (
            f"{asked}, which need fixed memory addresses, but zero_stage=3 on {sizes} gathers "
            f"parameters to new addresses in each step. Use zero_stage=2, or {instead}"
        )
    # A gradient is the output of a graph, and its memory that of the next backward's.
    count = options.microbatches(sizes.pipeline) if sizes.pipeline > 1 else 1
    offload = options.offload_options
    if count > 1:
        yield (
            f"{asked}, which overwrite the previous gradient, but the gradients of "
            f"num_microbatches={count} have to be added. Use {instead}"
        )
    elif accumulates and (offload is None or offload.accumulate_on != "host"):
        yield (
            f"{asked}, which overwrite the previous gradient, but the gradients of accumulated "
            f"batches have to be added. Use accumulate_grad_batches=1, or {instead}"
        )


def _gathers_parameters(options: MeshOptions, sizes: ParallelSizes) -> bool:
    """Whether the parameters of a block are gathered before it runs."""
    return options.zero_stage == 3 and sizes.data_shard > 1


def compile_blocks(
    module: nn.Module, resolved: ResolvedPlan, mesh: ParallelMesh, options: MeshOptions
) -> None:
    """Compile the forward of every block that this rank holds, and of the layers beside them, each
    at its first call.

    Args:
        module: Changed in place.
        resolved: Its resolved plan.
        mesh: Mesh of this run.
        options: The options of the strategy.
    """
    chosen = options.compiler
    if options.async_tensor_parallel and mesh.sizes.tensor > 1:
        # Before the first compilation, which asks whether the group has symmetric memory.
        use_symmetric_memory(mesh.group("tp"))
        chosen = {**chosen, "options": {**(chosen.get("options") or {}), _ASYNC: True}}
    found = map(module.get_submodule, resolved.block_names)
    # Stubs stand where other stages have blocks.
    blocks = [block for block in found if not isinstance(block, StageStub)]
    for index, block in enumerate(blocks):
        said = f"compiling block {index + 1} of {len(blocks)}"
        wrap_forward(block, partial(_compiled, block, chosen, said), "compile")
    for name, layer in layers_beside(module, resolved.block_names):
        wrap_forward(layer, partial(_compiled, layer, chosen, f"compiling {name}"), "compile")


def layers_beside(module: nn.Module, block_names: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Give the layers with parameters that are children of a module around blocks: embeddings, the
    last norm and the head, with their names.

    Compiled, a head whose vocabulary is no multiple of 8 is padded. Without that, cuBLAS has only
    slow products of 16-bit numbers for it: the kernels of a step of GPT-2 took 66 ms on an H200,
    and 42 ms with it.

    Args:
        module: Holds the blocks.
        block_names: FQNs of all blocks.
    """
    around = {""} | {parent for name in block_names for parent in _parents(name)}
    for parent in sorted(around):
        for name, child in module.get_submodule(parent).named_children():
            is_layer = not any(child.children()) and any(True for _ in child.parameters())
            if is_layer and not isinstance(child, StageStub):
                yield f"{parent}.{name}".strip("."), child


def _parents(name: str) -> Iterator[str]:
    """Give the names of the modules around one, the innermost first."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _compiled(block: nn.Module, options: dict[str, Any], said: str, inner: Forward) -> Forward:
    """Return a compiled forward, which shows that the first call with and without gradients, in
    training and in evaluation, takes long.
    """
    compiled, seen = torch.compile(inner, **options), set[tuple[bool, bool]]()

    def forward(*args: Any, **kwargs: Any) -> Any:
        # torch.compile has a graph of its own for each of these, as its guards read both.
        form = block.training, torch.is_grad_enabled()
        if form in seen:
            return compiled(*args, **kwargs)
        seen.add(form)
        with counted("blocks", said, 1):
            return compiled(*args, **kwargs)

    return forward
