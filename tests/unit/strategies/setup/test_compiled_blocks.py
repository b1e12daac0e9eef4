"""What blocks cannot be compiled with is refused with what would work."""

from typing import Any

import pytest
import torch
from torch import nn

from lightning_par.errors import ConfigurationError
from lightning_par.plan.resolved_plan import check_plan
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.options import MeshOptions
from lightning_par.strategies.setup.compiled_blocks import check_compiled, layers_beside
from tests.support.models.toy_gpt import ToyLM

ASYNC: dict[str, Any] = {"async_tensor_parallel": True, "compile_blocks": True}

TENSOR, SHARDS = ParallelSizes(tensor=2), ParallelSizes(data_shard=2)
ONE, STAGES = ParallelSizes(), ParallelSizes(pipeline=2)


def check(
    options: dict[str, Any], sizes: ParallelSizes, device: str, *, accumulates: bool = False
) -> None:
    model = ToyLM()
    resolved = check_plan(model, model.parallel_plan(), sizes)
    given = MeshOptions(**options), resolved, sizes, torch.device(device)
    check_compiled(*given, accumulates=accumulates)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({**ASYNC, "compile_blocks": False}, "needs compile_blocks=True"),
        ({**ASYNC, "compile_blocks": {"backend": "eager"}}, "of torch.compile, not 'eager'"),
        (
            {**ASYNC, "compile_blocks": {"mode": "max-autotune"}},
            r"instead of mode='max-autotune'.*list_mode_options\('max-autotune'\)",
        ),
        ({**ASYNC, "sequence_parallel": False}, "needs sequence parallelism"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_asynchronous_tensor_parallelism_says_what_it_needs(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        check(options, TENSOR, "cuda")
    with pytest.raises(ConfigurationError, match=r"(?s)2 problems.*runs on cpu"):
        check(options, TENSOR, "cpu")


def test_asynchronous_tensor_parallelism_needs_gpus() -> None:
    check(ASYNC, TENSOR, "cuda")
    check({**ASYNC, "compile_blocks": {"options": {"max_autotune": True}}}, TENSOR, "cuda")
    with pytest.raises(ConfigurationError, match="needs GPUs, but the Trainer runs on cpu"):
        check(ASYNC, TENSOR, "cpu")


@pytest.mark.parametrize(
    "compiler",
    [{"mode": "max-autotune"}, {"backend": "cudagraphs"}, {"options": {"triton.cudagraphs": True}}],
    ids=str,
)
def test_graphs_are_refused_where_parameters_move(compiler: dict[str, Any]) -> None:
    options = {"compile_blocks": compiler}
    with pytest.raises(ConfigurationError, match=r"CUDA graphs.*on dp_shard 2.*=2, or"):
        check({**options, "zero_stage": 3}, SHARDS, "cuda")
    check({**options, "zero_stage": 2}, SHARDS, "cuda")
    check({**options, "zero_stage": 3}, TENSOR, "cuda")
    check({**options, "zero_stage": 3}, SHARDS, "cpu")
    check({"compile_blocks": {"dynamic": False}, "zero_stage": 3}, SHARDS, "cuda")


def test_graphs_are_refused_where_gradients_add_up() -> None:
    """The gradients of a backward are outputs of its graph, which the next one writes over."""
    graphs: dict[str, Any] = {"compile_blocks": {"mode": "reduce-overhead"}}
    with pytest.raises(ConfigurationError, match=r"CUDA graphs.*Use accumulate_grad_batches=1, or"):
        check(graphs, SHARDS, "cuda", accumulates=True)
    check({**graphs, "offload_options": {"accumulate_on": "host"}}, ONE, "cuda", accumulates=True)
    check(graphs, SHARDS, "cpu", accumulates=True)
    check({"compile_blocks": True}, SHARDS, "cuda", accumulates=True)
    with pytest.raises(
        ConfigurationError, match=r"CUDA graphs.*num_microbatches=8 have to be added"
    ):
        check(graphs, STAGES, "cuda")
    check({**graphs, "num_microbatches": 1}, STAGES, "cuda")
    check(graphs, STAGES, "cpu")


def test_layers_beside_blocks_are_found_around_every_list_of_them() -> None:
    """As in most models of transformers: a head around a body, in which the blocks are."""
    body = nn.ModuleDict(
        {
            "embed": nn.Embedding(4, 4),
            "vision": nn.Sequential(nn.Linear(4, 4)),  # no layer, and no list of blocks
            "blocks": nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)),
            "dropout": nn.Dropout(),
            "norm": nn.LayerNorm(4),
        }
    )
    module = nn.ModuleDict({"model": body, "head": nn.Linear(4, 5), "loss": nn.CrossEntropyLoss()})
    names = [name for name, _ in layers_beside(module, ["model.blocks.0", "model.blocks.1"])]
    assert names == ["head", "model.embed", "model.norm"]
