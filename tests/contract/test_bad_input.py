"""Whatever a user gets wrong is said in one clear error, soon, before or on every rank."""

import re
import time
import traceback

import pytest
from lightning.pytorch.plugins.precision import Precision
from torch.utils.data import DataLoader

from lightning_par.errors import ConfigurationError, MeshError, PlanError
from lightning_par.plan.parallel_plan import BatchLayout, ParallelPlan
from tests.support.faults.user_mistakes import (
    Borrowing,
    Case,
    fit,
    Heads,
    Hidden,
    LogitsForLoss,
    Manual,
    NaN,
    NoLoss,
    Penalized,
    planned,
    Stream,
    TwoPlans,
    with_tensor,
)
from tests.support.ranks.api import RankError, run_ranks

pytestmark = [pytest.mark.contract, pytest.mark.filterwarnings("ignore")]
SECONDS = 5.0


class TransformerEngine(Precision):
    """Has the name of a precision that is not on every machine."""

    precision = "transformer-engine"


MESH = {
    "tp 3 on 2 devices": Case(
        error=MeshError,
        options={"tp": 3},
        says=r"tensor_parallel_size=3 needs 3 devices or a multiple, but the Trainer has 2\. Use 3 "
        r"devices, or sizes whose product is one of 1 or 2\.",
    ),
    "sizes that leave devices over": Case(
        error=MeshError,
        options={"tp": 2, "pp": 1, "dp": 1},
        devices=4,
        says=r"data_parallel_size=1 needs exactly 2 devices, but the Trainer has 4\. Use "
        r"2 devices, "
        r"or data_parallel_size=2 or 'auto'",
    ),
    "size 0": Case(
        error=MeshError, options={"pp": 0}, says=r"pipeline_parallel_size=0 must be a whole number"
    ),
    "negative size": Case(
        error=MeshError,
        options={"dp": -2},
        says=r"data_parallel_size=-2 must be a whole number of 1",
    ),
    "size of another type": Case(
        error=MeshError, options={"tp": "two"}, says=r"tensor_parallel_size='two' must .*or 'auto'"
    ),
    "several sizes": Case(
        error=MeshError,
        options={"tp": 0, "pp": 1.5, "zero_stage": 4},
        says=r"3 "
        r"problems:\n.*tensor_parallel_size=0.*\n.*pipeline_parallel_size=1\.5.*\n.*zero_stage=4",
    ),
    "tp 2 on the CPU's auto": Case(
        error=MeshError,
        options={"tp": 2},
        devices="auto",
        says=r"has 1\. Use 2 devices \(on the CPU, devices='auto' means 1\)",
    ),
    "tp larger than a node": Case(
        error=MeshError,
        options={"tp": 4},
        trainer=lambda: {"num_nodes": 2},
        says=r"tensor_parallel_size=4 does not divide the 2 devices of a node; use one of 1 or 2",
    ),
    "zero stage 4": Case(
        error=MeshError, options={"zero_stage": 4}, says=r"zero_stage=4 must be 0, 1, 2 or 3"
    ),
    "replicas that do not divide": Case(
        error=MeshError,
        options={"tp": 1, "pp": 1, "data_parallel_replicate_size": 3},
        says=r"data_parallel_replicate_size=3 does not divide data_parallel_size=2; use "
        r"one of 1 or 2",
    ),
    "replicas at stage 0": Case(
        error=MeshError,
        options={"tp": 1, "pp": 1, "data_parallel_replicate_size": 1, "zero_stage": 0},
        says=r"data_parallel_replicate_size=1 has no effect with zero_stage=0.*out, or use "
        r"zero_stage=1, 2",
    ),
}

OPTIONS = {
    "unknown option": Case(
        error=TypeError,
        options={"tensor_paralel_size": 2},
        says=r"no option 'tensor_paralel_size' \(did you mean "
        r"'tensor_parallel_size'\?\)\. Its options",
    ),
    "unknown strategy": Case(
        error=ValueError,
        strategy="hybrid_3d",
        says=r"invalid strategy name: `strategy='hybrid_3d'`",
    ),
    "unknown schedule": Case(
        error=ConfigurationError,
        options={"schedule": "1f1bb"},
        says=r"schedule='1f1bb' must be 1f1b, .*gpipe, .*or a file; did you mean '1f1b'\?",
    ),
    "no micro-batches": Case(
        error=ConfigurationError,
        options={"num_microbatches": 0},
        says=r"num_microbatches=0 must be a whole number of 1 or more, or 'auto'",
    ),
    "stage blocks that are no list": Case(
        error=ConfigurationError,
        options={"stage_blocks": 2},
        says=r"stage_blocks=2 must be a list with the number of blocks of each stage.*\[3, 4, 5\]",
    ),
    "stage blocks with another sum": Case(
        error=PlanError,
        options={"pp": 2, "stage_blocks": [3, 2]},
        says=r"stage_blocks=\[3, 2\] has 2 entries with the sum 5;.*sum is 4, the number of blocks "
        r"in model\.blocks",
    ),
    "stage blocks without a pipeline": Case(
        error=ConfigurationError,
        options={"pp": 1, "stage_blocks": [3, 1]},
        says=r"stage_blocks=\[3, 1\] needs pipeline_parallel_size=2, but pipeline",
    ),
    "manual optimization": Case(
        error=ConfigurationError,
        options={"pp": 2},
        module=Manual,
        says=r"pipeline_parallel_size=2: Manual uses manual "
        r"optimization.*automatic_optimization=True",
    ),
    "a precision of transformer engine": Case(
        error=ConfigurationError,
        options={"tp": 2},
        trainer=lambda: {"plugins": [TransformerEngine()]},
        says=r"precision='transformer-engine' is not supported on tp 2: use 32-true, 64-true, "
        r"16-mixed, bf16-mixed, 16-true or bf16",
    ),
    "batch smaller than the micro-batches": Case(
        error=ConfigurationError,
        options={"pp": 2, "num_microbatches": 5},
        ranks=True,
        says=r"num_microbatches=5: a batch of 4 samples.*num_microbatches=4 or less, or "
        r"batch_size=5",
    ),
}

PLANS = {
    "query heads": Case(
        error=PlanError,
        options={"tp": 4},
        devices=4,
        says=r"tensor_parallel_size=4: model\.blocks\.0\.attention \(and 3 others\) has "
        r"heads=6, not "
        r"divisible by 4\. Use tensor_parallel_size=1 or 2, or change",
    ),
    "key heads": Case(
        error=PlanError,
        options={"tp": 2},
        module=lambda: Heads(kv_heads=3),
        says=r"model\.blocks\.2\.attention has kv_heads=3, not divisible by 2\. Use .*=1, or",
    ),
    "hidden": Case(
        error=PlanError,
        options={"tp": 2},
        module=Hidden,
        says=r"model\.blocks\.1\.mlp\.0\.weight has size 7 in dim 0, not divisible .*=1,",
    ),
    "pattern that matches nothing": Case(
        error=PlanError,
        options={"tp": 2},
        module=with_tensor({"blocks.*.attn.query": "colwise"}),
        says=r"'model\.blocks\.\*\.attn\.query' matches no module; did you mean 'model\.blocks\.\*",
    ),
    "pattern that matches twice": Case(
        error=PlanError,
        options={"tp": 2},
        module=with_tensor({"blocks.0.*": "replicated"}),
        says=r"both 'model\.blocks\.\*\.norm\[12\]' and "
        r"'model.* match model\.blocks\.0\.norm1",
    ),
    "unknown style": Case(
        error=PlanError,
        module=lambda: with_tensor({"head": "column"})(),
        says=r"'head' the style 'column', which does not exist; .*se one of colwise, .*vocab_head",
    ),
    "unknown tied name": Case(
        error=PlanError,
        options={"pp": 2},
        module=planned(tied=(("embed.weight", "heads.weight"),)),
        says=r"tied= names 'model\.heads\.weight'.*did you mean 'model\.head\.weight'\?",
    ),
    "tie that is none": Case(
        error=PlanError,
        options={"pp": 2},
        module=planned(tied=(("embed.weight", "position.weight"),)),
        says=r"model\.embed\.weight and model\.position\.weight are different "
        r"parameters.*Tie them",
    ),
    "blocks that are not there": Case(
        error=PlanError,
        options={"pp": 2},
        module=planned(blocks="layers"),
        says=r"names 'model\.layers', but the model has no module .*; did you mean 'model\.",
    ),
    "no plan under tp, and none can be inferred": Case(
        error=PlanError,
        options={"tp": 2},
        ranks=True,
        module=Borrowing,
        says=r"tensor_parallel_size=2: no plan could be inferred.*is read by the forward of .*"
        r"declare parallel_plan\(\).*plan=",
    ),
    "no plan under pp, and none can be inferred": Case(
        error=PlanError,
        options={"pp": 2},
        ranks=True,
        module=Penalized,
        says=r"pipeline_parallel_size=2: no plan could be inferred.*a parameter of model\.blocks",
    ),
    "more stages than blocks": Case(
        error=PlanError,
        options={"tp": 1, "pp": 5},
        devices=5,
        says=r"pipeline_parallel_size=5: model\.blocks has 4 blocks.*Use .*=4 or less",
    ),
    "no style under sequence parallelism": Case(
        error=PlanError,
        options={"tp": 2},
        module=planned(tensor={"head": "vocab_head"}, divided={}),
        says=r"no tensor style: model\.embed, .*model\.blocks\.0\.norm1 \(and 3 others\).*Give",
    ),
    "two plans": Case(
        error=PlanError,
        options={"tp": 2},
        module=TwoPlans,
        says=r"2 submodules define parallel_plan\(\): model, critic\..*model, TwoPlans,",
    ),
    "negative label shift": Case(
        error=PlanError,
        module=lambda: planned(batch=BatchLayout(label_shift=-1))(),
        says=r"label_shift=-1 must be 0 or more",
    ),
    "text for names": Case(
        error=PlanError,
        module=lambda: ParallelPlan(last="head"),
        says=r"last='head' must be a tuple of names",
    ),
}

TP, PP = {"tp": 2, "pp": 1}, {"tp": 1, "pp": 2}
STEPS = {
    "style that does not fit its neighbors": Case(
        error=PlanError,
        options={**TP, "sequence_parallel": False},
        ranks=True,
        module=with_tensor({"blocks.*.mlp.0": "replicated"}),
        says=r"(?s)model\.blocks\.0\.mlp\.2 \(Linear\) failed while .*do not fit each other.*"
        r"model\.blocks\.0\.mlp\.0 \(whole\), model\.blocks\.0\.mlp\.2 \(divided\)\."
        r".*'vocab_head' is for .*\. Give a layer",
    ),
    "batch entry that is absent": Case(
        error=PlanError,
        options=TP,
        ranks=True,
        module=planned(batch=BatchLayout(sequence_dims={"tokens": 1})),
        says=r"batch entry 'tokens', but the batch has \['ids', 'labels'\]",
    ),
    "labels that are absent": Case(
        error=PlanError,
        options=PP,
        ranks=True,
        module=planned(batch=BatchLayout(labels="targets")),
        says=r"batch entry 'targets', but the batch has \['ids', 'labels'\]",
    ),
    "sequence dim that is absent": Case(
        error=PlanError,
        options=TP,
        ranks=True,
        module=planned(batch=BatchLayout(sequence_dims={"ids": 2})),
        says=r"dim 2 of the batch entry 'ids' is its sequence dim, but its shape is \(4, 12\)",
    ),
    "stream with small batches": Case(
        error=ConfigurationError,
        options={**PP, "num_microbatches": 5},
        ranks=True,
        loader=lambda: DataLoader(Stream(), batch_size=3),
        says=r"num_microbatches=5: a batch of 3 samples",
    ),
    "no loss": Case(
        error=ConfigurationError,
        options=PP,
        ranks=True,
        dies=True,
        module=NoLoss,
        says=r"training_step returned None\. Under a pipeline it has to return the loss as",
    ),
    "loss that is no scalar": Case(
        error=ConfigurationError,
        options=PP,
        ranks=True,
        dies=True,
        module=LogitsForLoss,
        says=r"returned a dict with the keys \['loss'\] whose loss has the shape \(\d, 2, 19\)",
    ),
    "value of another stage": Case(
        error=PlanError,
        options=PP,
        ranks=True,
        module=NaN,
        says=r"model\.embed is used after the blocks.*or in replicated=",
    ),
}
CASES = {**MESH, **OPTIONS, **PLANS, **STEPS}


def attempt(rank, world, name):
    """Fit on one rank; give the classes of the exception, its text and the seconds taken."""
    start = time.monotonic()
    try:
        fit(CASES[name])
    except Exception as error:
        if CASES[name].dies:
            raise
        kinds = [kind.__name__ for kind in type(error).__mro__]
        text = "".join(traceback.format_exception_only(error))
        return kinds, text, time.monotonic() - start
    raise AssertionError("no error")


def test_there_are_at_least_25_cases():
    assert len(CASES) >= 25


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if not case.ranks])
def test_it_is_said_before_any_process_starts(name, monkeypatch):
    case = CASES[name]
    monkeypatch.setattr("subprocess.Popen", lambda *a, **k: pytest.fail("a process was started"))
    start = time.monotonic()
    with pytest.raises(case.error) as caught:
        fit(case)
    assert time.monotonic() - start < SECONDS
    assert re.search(case.says, str(caught.value), re.DOTALL), str(caught.value)
    assert type(caught.value).__module__ in ("builtins", "lightning_par.errors")


@pytest.mark.distributed
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.ranks and not c.dies])
def test_it_is_said_on_every_rank(name):
    case = CASES[name]
    run_ranks(attempt, 2, name)  # new ranks import and cache; that is not timed
    for kinds, text, seconds in run_ranks(attempt, 2, name):
        assert case.error.__name__ in kinds
        assert re.search(case.says, text, re.DOTALL), text
        assert seconds < SECONDS


@pytest.mark.distributed
@pytest.mark.parametrize("name", [n for n, c in CASES.items() if c.dies])
def test_the_rank_that_knows_is_the_one_that_is_reported(name):
    case, start = CASES[name], time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(attempt, 2, name)
    text = str(caught.value)
    assert text.startswith(f"rank 1 of 2 failed in attempt: {case.error.__name__}: ")
    assert re.search(case.says, text, re.DOTALL), text
    assert time.monotonic() - start < 2 * SECONDS
