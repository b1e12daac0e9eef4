"""Laws of resolving a plan against a model: what belongs where, and what is refused."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_par.errors import PlanError
from lightning_par.plan.parallel_plan import ParallelPlan
from lightning_par.plan.resolved_plan import balance_blocks, check_plan, resolve_plan
from lightning_par.sizes import ParallelSizes
from tests.support.models.toy_gpt import ToyLM


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.up, self.down = nn.Linear(6, hidden), nn.Linear(hidden, 6)
        self.heads = 6


class Net(nn.Module):
    """A part of every kind: direct parameters, tables, side by side, inside, tied."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.table = nn.Embedding(7, 6)
        self.dropout = nn.Dropout(0.5)
        self.wrap = nn.ModuleDict({"before": nn.Linear(6, 2), "after": nn.Linear(6, 3)})
        self.body = nn.Module()
        self.body.shift = nn.Parameter(torch.ones(2))
        self.body.enter = nn.Linear(6, 6)
        self.body.blocks = nn.ModuleList([Block(2), Block(4), Block(6)])
        self.body.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.table.weight


def resolve(model=None, **fields):
    with torch.device("meta"):
        model = model or Net()
    return resolve_plan(model, ParallelPlan(**{"blocks": "body.blocks", **fields}))


def test_units_before_the_blocks_are_first_those_after_are_last_at_every_level():
    assert dict(resolve().units) == {
        "scale": "first",
        "table": "first",
        "dropout": "every",
        "wrap.before": "first",  # entries of a list by themselves
        "wrap.after": "first",
        "body.shift": "first",
        "body.enter": "first",
        "body.norm": "last",
        "head": "last",
    }


def test_declared_roles_go_before_the_order_of_definition():
    layout = resolve(first=("head",), last=("scale", "table"), replicated=("body.norm", "wrap"))
    named = ("head", "scale", "table", "body.norm", "wrap.before", "wrap.after")
    got = {n: layout.units[n] for n in named}
    assert got == {
        "head": "first",
        "scale": "last",
        "table": "last",
        "body.norm": "every",
        "wrap.before": "every",
        "wrap.after": "every",
    }


def test_a_role_below_a_module_beside_the_blocks_splits_that_module():
    units = resolve(last=("wrap.after",), replicated=("wrap.before.bias",)).units
    assert {n: p for n, p in units.items() if n.startswith("wrap")} == {
        "wrap.before.bias": "every",
        "wrap.before.weight": "first",
        "wrap.after": "last",
    }


def test_stages_of_every_parameter():
    layout = resolve(replicated=("body.enter",))
    bounds = ((0, 1), (1, 2), (2, 3))
    everywhere = {0, 1, 2}
    wanted = {
        "scale": {0},
        "table.weight": {0},
        "wrap.after.bias": {0},
        "body.enter.weight": everywhere,
        "body.blocks.0.up.weight": {0},
        "body.blocks.1": {1},
        "body.blocks.2.down.bias": {2},
        "body.norm.weight": {2},
        "head.weight": {2},
        "body.blocks": everywhere,
        "body": everywhere,
    }
    assert {n: set(layout.stages_of(n, bounds)) for n in wanted} == wanted
    assert layout.stages_of("body.blocks.1.up.weight", ((0, 2), (2, 3))) == {0}


def test_ten_blocks_are_not_confused_with_one():
    model = ToyLM(blocks=12)
    layout = resolve_plan(model, model.parallel_plan())
    bounds = ((0, 2), (2, 12))
    assert layout.stages_of("blocks.1.norm1.weight", bounds) == {0}
    assert layout.stages_of("blocks.10.norm1.weight", bounds) == {1}


def test_ties_are_found_by_identity_and_the_first_name_is_canonical():
    layout = resolve()
    assert layout.tied == (("table.weight", "head.weight"),)
    assert layout.canonical["head.weight"] == "table.weight"
    assert layout.canonical["body.norm.bias"] == "body.norm.bias"
    assert resolve(tied=(("table.weight", "head.weight"),)).tied == layout.tied


def test_weights_count_parameters_and_tables_cost_nothing():
    layout = resolve()
    assert layout.block_names == ("body.blocks.0", "body.blocks.1", "body.blocks.2")
    assert layout.block_weights == tuple(6 * h + h + 6 * h + 6 for h in (2, 4, 6))
    assert layout.edge_weights == (7 * 2 + 7 * 3 + 7 * 6, 6 * 2 + 6 * 7)


def test_resolving_reads_shapes_only_and_changes_nothing():
    model = ToyLM()
    before = {n: p.clone() for n, p in model.named_parameters()}
    attributes = dict(vars(model.blocks[0].attention))
    check_plan(model, model.parallel_plan(), ParallelSizes(tensor=2, pipeline=2))
    assert dict(vars(model.blocks[0].attention)) == attributes
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


NAMES = {
    "blocks": (
        {"blocks": "body.block"},
        r"blocks=\.\.\.\) names 'body\.block'.*mean 'body\.blocks'\?",
    ),
    "not a container": (
        {"blocks": "head"},
        r"names head, which is a Linear\. Name the nn\.ModuleList",
    ),
    "first": ({"first": ("tabel",)}, r"first names 'tabel'.*did you mean 'table'\?"),
    "last": ({"last": ("body.nrm",)}, r"last names 'body\.nrm'.*did you mean 'body\.norm'\?"),
    "two roles": (
        {"first": ("wrap",), "last": ("wrap",)},
        r"names wrap both in first= and in last=",
    ),
    "in a block": (
        {"replicated": ("body.blocks.1.up",)},
        r"replicated=\.\.\.\) names 'body\.blocks\.1\.up'.*a part of the block body\.blocks\.1",
    ),
    "nothing": (
        {"tensor": {"body.blocks.*.upp": "colwise"}},
        r"'body\.blocks\.\*\.upp' matches no module; did you mean 'body\.blocks\.\*\.up'",
    ),
    "twice": (
        {"tensor": {"body.blocks.*.up": "colwise", "body.blocks.1.*": "rowwise"}},
        r"both 'body\.blocks\.\*\.up' and 'body\.blocks\..*' match body\.blocks\.1\.up",
    ),
    "no number": (
        {"divided": {"body.blocks.*": ("head",)}},
        r"body\.blocks\.0 has no attribute 'head' that is a whole number; did you mean 'heads'\?",
    ),
    "unknown tie": (
        {"tied": (("table.weight", "haed.weight"),)},
        r"'haed\.weight'.*'head\.weight'",
    ),
    "no tie": (
        {"tied": (("table.weight", "body.norm.weight"),)},
        r"table\.weight and body\.norm\.weight are different.*body\.norm\.weight = table\.weight",
    ),
    "experts": (
        {"experts": ("body.experts.*",)},
        r"experts=\.\.\.\): 'body\.experts\.\*' matches no module",
    ),
    "checkpointable": (
        {"checkpointable": ("mlp",)},
        r"checkpointable=\.\.\.\): 'mlp' matches no module",
    ),
}


@pytest.mark.parametrize("case", NAMES)
def test_names_that_do_not_fit_are_refused_with_the_nearest(case):
    fields, message = NAMES[case]
    with pytest.raises(PlanError, match=message):
        resolve(**fields)


def test_every_problem_is_in_one_message():
    with pytest.raises(PlanError, match=r"^4 problems:\n(  - .*(\n|$)){4}$"):
        resolve(
            blocks="bodi.blocks",
            first=("tabel",),
            tensor={"x.*": "colwise"},
            tied=(("scale", "wieght"),),
        )


STYLES = {"body.blocks.*.up": "colwise", "body.blocks.*.down": "rowwise", "head": "vocab_head"}
SIZES = {
    "weights": (
        {"tensor": STYLES},
        {"tensor": 3},
        r"tensor_parallel_size=3: body\.blocks\.0\.up\.weight has size 2 in dim 0, not divisible "
        r"by 3\. Use tensor_parallel_size=1 or 2, or .*\n.*body\.blocks\.1\.up\.weight has size 4",
    ),
    "alike": (
        {"tensor": STYLES, "divided": {"body.blocks.*": ("heads",)}},
        {"tensor": 4},
        r"body\.blocks\.0 \(and 2 others\) has heads=6, not divisible by 4\. Use .*=1 or 2, or ",
    ),
    "too many for the vocabulary": (
        {"tensor": {"head": "vocab_head"}},
        {"tensor": 8},
        r"head\.weight has 7 rows, so tensor_parallel_size=8",
    ),
    "no style": (
        {"tensor": {"head": "vocab_head"}},
        {"tensor": 2},
        r"sequence_parallel=True: these.*no tensor style: Net itself, table, .*"
        r"body\.blocks\.0\.up \(and 2 others\), ",
    ),
    "tie in two styles": (
        {"tensor": {"table": "replicated", "head": "vocab_head"}},
        {"tensor": 2},
        r"table\.weight and head\.weight are one parameter, but table is 'replicated' and head is "
        r"'vocab_head'\. .*\('vocab_embedding' and 'vocab_head'\)",
    ),
    "no tensor part": ({}, {"tensor": 2}, r"the plan of Net gives no layer a tensor style"),
    "container": (
        {"tensor": {"wrap": "colwise"}},
        {"tensor": 2},
        r"'colwise', which needs a module with a weight of 2 dims, but wrap is a ModuleDict",
    ),
    "stages": (
        {},
        {"pipeline": 5},
        r"pipeline_parallel_size=5: body\.blocks has 3 blocks.*Use .*=3 or less\.",
    ),
    "no blocks": (
        {"blocks": None},
        {"pipeline": 2},
        r"plan of Net does not say .* Return ParallelPlan\(blocks=\"body\.blocks\"\)",
    ),
}


@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_do_not_fit_the_model_are_refused_with_the_numbers(case):
    fields, sizes, message = SIZES[case]
    plan = ParallelPlan(**{"blocks": "body.blocks", **fields})
    with pytest.raises(PlanError, match=message):
        check_plan(Net(), plan, ParallelSizes(**sizes))


@pytest.mark.parametrize("by_hand", [[1, 1], [3], [1, 1, 1], [0, 3], [4, -1]])
def test_stage_blocks_that_do_not_cover_the_blocks_are_refused(by_hand):
    plan, numbers = ParallelPlan(blocks="body.blocks"), rf"stage_blocks=\[{str(by_hand)[1:-1]}\]"
    with pytest.raises(PlanError, match=rf"{numbers}.*sum {sum(by_hand)};.*2 entries.* is 3, the"):
        check_plan(Net(), plan, ParallelSizes(pipeline=2), stage_blocks=by_hand)


def test_uneven_vocabulary_fits():
    model = ToyLM()
    sizes = ParallelSizes(tensor=2)
    layout = check_plan(model, model.parallel_plan(), sizes)
    assert model.head.weight.shape[0] % 2 == 1
    assert layout.styles["head"] == "vocab_head"


def stages(weights, edges, count, by_hand=None):
    layout = SimpleNamespace(block_weights=weights, edge_weights=edges)
    return balance_blocks(layout, count, by_hand)


def loads(bounds, weights, edges):
    found = [sum(weights[lo:hi]) for lo, hi in bounds]
    found[0] += edges[0]
    found[-1] += edges[1]
    return found


def brute_force(weights, edges, count):
    cuts = itertools.combinations(range(1, len(weights)), count - 1)
    options = [list(itertools.pairwise((0, *cut, len(weights)))) for cut in cuts]
    return min(max(loads(bounds, weights, edges)) for bounds in options)


@pytest.mark.parametrize("edges", [(0, 0), (11, 0), (2, 30)])
@pytest.mark.parametrize("weights", [(5, 3, 2, 7), (1, 1, 9, 1, 1, 4), (2, 3, 5, 7, 11, 13, 17)])
def test_balanced_stages_have_the_smallest_maximum(weights, edges):
    for count in range(1, len(weights) + 1):
        bounds = stages(weights, edges, count)
        assert [lo for lo, _ in bounds] == [0, *(hi for _, hi in bounds[:-1])]
        assert bounds[-1][1] == len(weights)
        assert all(lo < hi for lo, hi in bounds)
        assert max(loads(bounds, weights, edges)) == brute_force(weights, edges, count)


def test_a_heavy_head_makes_the_last_stage_shorter():
    assert stages((1,) * 8, (0, 3), 2) == ((0, 5), (5, 8))


def test_equal_blocks_are_spread_evenly():
    sizes = sorted(hi - lo for lo, hi in stages((4,) * 8, (0, 0), 3))
    assert sizes == [2, 3, 3]


def test_stage_blocks_by_hand_are_taken_as_they_are():
    assert stages((9, 1, 1, 1, 1, 1), (0, 0), 3, [3, 1, 2]) == ((0, 3), (3, 4), (4, 6))


def test_one_stage_holds_all_blocks_even_if_there_are_none():
    assert stages((2, 3, 5), (1, 7), 1) == ((0, 3),)
    assert stages((), (1, 7), 1) == ((0, 0),)
