"""Hugging Face models in place: every layout computes what one process computes.

Parts of these models are computed in float32 whatever their dtype; `DoublePrecision` lifts that on
both sides, so that the comparison can be sharp.
"""

import re
import warnings
from functools import cache
from typing import Any

import pytest
import torch

from lightning_par import check_plan, Hybrid3DStrategy, ParallelSizes
from lightning_par.engine.memory.placement import find_placements
from lightning_par.inference.lookup import find_plan
from lightning_par.observe.modes import DoublePrecision
from lightning_par.strategies import MeshStrategy
from tests.support.models.huggingface import ADAPTED, FAMILIES, HFModule, MODELS, PaddedText
from tests.support.models.toy_gpt import loader
from tests.support.parity import quiet_trainer, Recorder, Result, TOLERANCE
from tests.support.ranks.api import run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 1},
    "tp2 whole": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "sequence_parallel": False,
    },
    "pp2": {"tensor_parallel_size": 1, "pipeline_parallel_size": 2},
    "tp2 pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "cp2": {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 2,
    },
    "cp2 tp2": {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "context_parallel_size": 2,
    },
    "cp2 pp2": {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 2,
        "context_parallel_size": 2,
    },
    "dp2 zero3": {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 2,
        "zero_stage": 3,
    },
}

_EXPERTS = {"data_parallel_size": 2, "expert_parallel_size": 2, "zero_stage": 1}
EXPERT_LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": {**LAYOUTS["dp2 zero3"], **_EXPERTS},
    "ep2 tp2": {**LAYOUTS["tp2"], **_EXPERTS},
    "ep2 pp2": {**LAYOUTS["pp2"], **_EXPERTS},
    "ep2 dp4 zero3": {**LAYOUTS["dp2 zero3"], "data_parallel_size": 4, "expert_parallel_size": 2},
}


def train(
    strategy: Any,
    *,
    devices: int,
    batch_size: int,
    family: str,
    on_meta: bool,
    size: int,
    explicit: bool = False,
    by_name: bool = False,
) -> Result:
    """Run three batches in float64, the last one odd, and say what came out."""
    torch.set_default_dtype(torch.float64)
    samples = PaddedText(size, family, explicit=explicit)
    recorder, user = Recorder(), HFModule(family, on_meta, by_name)
    trainer = quiet_trainer(
        devices=devices,
        strategy=strategy,
        callbacks=[recorder],
        precision="64-true",
        max_epochs=1,
        num_sanity_val_steps=0,
        gradient_clip_val=0.5,
    )
    held_out = loader(PaddedText(4, family, explicit=explicit), batch_size)
    with DoublePrecision(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not say which modules are its blocks, so.*")  # T5
        trainer.fit(user, loader(samples, batch_size), held_out)
    state = getattr(trainer.strategy, "gather_state_dict", user.state_dict)()
    return {
        "losses": recorder.losses,
        "gradients": recorder.gradients,
        "weights": {k: v.detach().clone() for k, v in state.items()},
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "shapes": recorder.shapes,
        "attentions": count_attentions(trainer.strategy),
    }


def count_attentions(strategy: Any) -> int:
    """How often attention was divided over the ranks."""
    sharded = isinstance(strategy, MeshStrategy) and strategy.parallel_model.steps.sequence
    return sharded.shard.calls if sharded else 0


def train_rank(rank: int, world: int, options: dict[str, Any], run: Any) -> Result:
    return train(Hybrid3DStrategy(**options), devices=world, **run)


@cache
def one_process(family: str, on_meta: bool, size: int, explicit: bool) -> Result:
    # Weights made on meta are drawn by name, which a plain Trainer does not do.
    strategy = "hybrid3d" if on_meta else "auto"
    try:
        return train(
            strategy,
            devices=1,
            batch_size=4,
            family=family,
            on_meta=on_meta,
            size=size,
            explicit=explicit,
        )
    finally:
        torch.set_default_dtype(torch.float32)


def assert_equal(
    family: str, name: str, *, on_meta: bool = False, explicit: bool = False, by_name: bool = False
) -> list[Result]:
    options = dict({**LAYOUTS, **EXPERT_LAYOUTS}[name])
    replicas = options.get("data_parallel_size", 1)
    if family == "mixtral aux":
        options["num_microbatches"] = 1  # the auxiliary loss is one of the whole micro-batch
    parts = options.get("context_parallel_size", 1)
    world = options["tensor_parallel_size"] * options["pipeline_parallel_size"] * parts * replicas
    run = {"family": family, "on_meta": on_meta, "size": 10 if replicas == 1 else 12}
    run["explicit"] = explicit
    wanted = one_process(**run)
    part = {**run, "batch_size": 4 // replicas, "by_name": by_name}
    results: list[Result] = run_ranks(train_rank, world, options, part, timeout=150)
    # transformers sums what balances experts in float32, replicas in another order.
    is_summed = family == "mixtral aux" and replicas > 1
    close = {"rtol": 0, "atol": 1e-7 if is_summed else TOLERANCE}
    ties = tied_names(family)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result["losses"], wanted["losses"], **close)
        torch.testing.assert_close(result["val_loss"], wanted["val_loss"], **close)
        assert len(result["gradients"]) == len(wanted["gradients"]) == 3
        for got, want in zip(result["gradients"], wanted["gradients"], strict=True):
            for fqn, grad in got.items():
                note = lambda m, n=fqn, r=rank: f"gradient of {n} on rank {r}: {m}"  # noqa: E731
                torch.testing.assert_close(grad, want[ties[fqn]], **close, msg=note)
    weights = results[0]["weights"]
    assert list(weights) == list(wanted["weights"])
    for fqn, weight in weights.items():
        note = lambda m, n=fqn: f"{n}: {m}"  # noqa: E731
        torch.testing.assert_close(weight, wanted["weights"][fqn], **close, msg=note)
    seen = {ties[fqn] for r in results for fqn in r["gradients"][0]}
    assert set(wanted["gradients"][0]) <= seen
    assert_parallel(results, wanted, options)
    assert_as_planned(family, results, options)
    return results


def assert_as_planned(family: str, results: list[Result], options: dict[str, Any]) -> None:
    """Fail if a rank holds anything else than `lightning-par plan` would say."""
    module = HFModule(family)
    plan = find_plan(module)
    assert plan is not None
    axes = {name: name for name in ("tensor", "pipeline", "context", "expert")}
    axes["data_shard"] = "data"
    sizes = ParallelSizes(**{a: options.get(f"{n}_parallel_size", 1) for a, n in axes.items()})
    owners = tuple(range(sizes.pipeline))
    layout = check_plan(module, plan, sizes)
    planned = find_placements(module, layout, sizes, rank_of_stage=owners)
    ties = tied_names(family)
    for rank, result in enumerate(results):
        shapes = {h.name: h.local_shape(rank, sizes) for h in planned}
        wanted = {name: shape for name, shape in shapes.items() if shape is not None}
        assert {ties[name]: shape for name, shape in result["shapes"].items()} == wanted


def tied_names(family: str) -> dict[str, str]:
    """Return every name of a parameter -> the name under which one process lists it."""
    first: dict[int, str] = {}
    named = MODELS[family]().named_parameters(prefix="model", remove_duplicate=False)
    return {name: first.setdefault(id(p), name) for name, p in list(named)}


def assert_parallel(results: list[Result], wanted: Result, options: dict[str, Any]) -> None:
    """Fail if blocks, heads or rows are not divided as the options say."""
    whole = {n: s for n, s in wanted["shapes"].items() if re.search(r"\.\d+\.", n)}
    blocks = [{re.search(r"\.\d+\.", n)[0] for n in r["shapes"] if n in whole} for r in results]
    assert len({frozenset(b) for b in blocks}) == options["pipeline_parallel_size"]
    degree = options["tensor_parallel_size"] * options.get("data_parallel_size", 1)
    key = next(
        n
        for n in whole
        if re.search(
            r"(\.q_proj|\.query|mlp\.c_proj|\.q|\.Wqkv|kv_b_proj)(\.base_layer)?\.weight$", n
        )
    )
    rows, *rest = whole[key]
    for result in results:
        held = result["shapes"].get(key)
        assert held in (None, (rows // degree, *rest))
    assert any(key in r["shapes"] for r in results)
    divides = options.get("context_parallel_size", 1) > 1
    assert all(bool(r["attentions"]) == divides for r in results)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama tied", "mixtral aux", "qwen3"])
def test_family_on_tensor_and_pipeline_ranks_equals_one_process(family: str) -> None:
    assert_equal(family, "tp2 pp2")


@pytest.mark.parametrize(
    ("family", "name", "explicit"),
    [
        ("bert", "cp2", False),
        ("gpt2", "cp2", True),
        ("qwen3", "cp2", False),
        ("mistral window", "cp2", False),
        ("gemma3", "cp2", False),
        ("modernbert", "cp2", False),
        ("deepseek", "cp2", False),
        ("llama tied", "cp2 tp2", False),
        ("mixtral", "cp2 pp2", False),
    ],
)
def test_family_on_divided_sequences_equals_one_process(
    family: str, name: str, explicit: bool
) -> None:
    """Padded at the end; causal labels are shifted before they are divided, or given so."""
    assert_equal(family, name, explicit=explicit)


@pytest.mark.parametrize(
    "name",
    [pytest.param("ep2", marks=pytest.mark.exhaustive), "ep2 tp2", "ep2 pp2", "ep2 dp4 zero3"],
)
def test_divided_experts_equal_one_process(name: str) -> None:
    """Each rank holds what the plan says, so experts are divided by all axes."""
    assert_equal("mixtral", name)


def test_labels_given_by_name_are_shifted_before_they_are_divided() -> None:
    assert_equal("llama", "cp2", by_name=True)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("adapters", "tp2 pp2"),
        ("adapters", "dp2 zero3"),
        ("adapters on top", "pp2"),
        *(
            pytest.param(family, name, marks=pytest.mark.exhaustive)
            for family in ADAPTED
            for name in LAYOUTS
        ),
    ],
)
def test_adapters_beside_frozen_layers_equal_one_process(family: str, name: str) -> None:
    """On every block, and on the last one only: then earlier stages have nothing to train."""
    results = assert_equal(family, name)
    trained = {n for r in results for n, grad in r["gradients"][0].items() if grad is not None}
    assert trained
    assert all("lora_" in name for name in trained)


def test_model_made_on_meta_and_sharded_equals_one_process() -> None:
    """Initialized parameter by parameter, by the model's own rules."""
    assert_equal("llama", "dp2 zero3", on_meta=True)


CELLS = [
    (family, name)
    for family in FAMILIES
    for name in LAYOUTS
    if not (family == "t5" and name != "dp2 zero3")
    and not (family == "mixtral aux" and name[:2] == "cp")  # its mean is one of a rank
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "name"), CELLS)
def test_family_equals_one_process(family: str, name: str) -> None:
    assert_equal(family, name)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ("t5", "mixtral aux")])
@pytest.mark.parametrize("name", ["cp2", "tp2 pp2"])
def test_explicit_positions_and_shifted_labels_equal_one_process(family: str, name: str) -> None:
    assert_equal(family, name, explicit=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("family", ["bert", "gpt2", "llama tied", "mixtral"])
def test_family_made_on_meta_equals_one_process(family: str, name: str) -> None:
    assert_equal(family, name, on_meta=True)
