"""Laws of the `ParallelPlan` value and of finding it on a model."""

import copy
import dataclasses
import json
import pickle

import pytest
from torch import nn

from lightning_par.errors import PlanError
from lightning_par.inference.lookup import find_plan
from lightning_par.plan.parallel_plan import BatchLayout, match_pattern, ParallelPlan

BATCH = BatchLayout(sequence_dims={"text.ids": 2}, labels="text.labels", label_shift=3)
EVERYTHING = {
    "blocks": "decoder.blocks",
    "first": ("embed",),
    "last": ("norm", "head"),
    "replicated": ("rotary",),
    "tied": (("embed.weight", "head.weight"),),
    "carried": ("auxiliary",),
    "kept": ("decoder.blocks.1",),
    "tensor": {"decoder.blocks.*.up": "colwise", "head": "vocab_head"},
    "divided": {"decoder.blocks.*.attention": ("heads", "kv_heads")},
    "batch": BATCH,
    "experts": ("decoder.blocks.*.experts.*",),
    "replica_sums": ("decoder.blocks.*.load",),
    "checkpointable": ("decoder.blocks.*.mlp",),
    "positions": {"decoder": "position_ids", "": "positions"},
    "captured": {"mlp.router": 1},
    "counts": {"decoder.blocks.*.attention": {"heads": 6}},
    "sequence_region": "blocks",
    "refusals": {"pipeline": "it has two lists of blocks."},
}
PLAN = ParallelPlan(**EVERYTHING)


class Offers(nn.Module):
    """Offers the plan with these blocks, and holds these children."""

    def __init__(self, blocks, **children):
        super().__init__()
        self.offered = blocks
        for name, child in children.items():
            self.add_module(name, child)

    def parallel_plan(self):
        return ParallelPlan(blocks=self.offered)


class Holds(nn.Module):
    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def test_the_sample_sets_every_field():
    empty = ParallelPlan()
    fields = [f.name for f in dataclasses.fields(ParallelPlan)]
    assert set(EVERYTHING) == set(fields)
    assert all(getattr(PLAN, name) != getattr(empty, name) for name in fields)


@pytest.mark.parametrize(("value", "field"), [(PLAN, "blocks"), (BATCH, "labels")])
def test_a_plan_and_its_batch_layout_are_frozen(value, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, field, "x")


@pytest.mark.parametrize("mapping", [PLAN.tensor, PLAN.divided, BATCH.sequence_dims])
def test_the_mappings_of_a_plan_cannot_be_changed(mapping):
    with pytest.raises(TypeError, match="does not support item assignment"):
        mapping["x"] = "colwise"


def test_a_plan_does_not_see_later_changes_of_the_dict_it_was_given():
    given = {"head": "colwise"}
    plan = ParallelPlan(tensor=given)
    given["embed"] = "vocab_embedding"
    assert dict(plan.tensor) == {"head": "colwise"}


def test_equal_plans_are_equal_and_hash_alike_whatever_the_containers_and_their_order():
    backwards = dict(reversed(EVERYTHING["tensor"].items()))
    divided = {k: list(v) for k, v in EVERYTHING["divided"].items()}
    lists = {"first": ["embed"], "tied": [["embed.weight", "head.weight"]]}
    other = ParallelPlan(**{**EVERYTHING, **lists, "tensor": backwards, "divided": divided})
    assert other == PLAN
    assert hash(other) == hash(PLAN)
    assert hash(dataclasses.replace(BATCH)) == hash(BATCH)


@pytest.mark.parametrize("field", EVERYTHING)
def test_plans_that_differ_in_one_field_differ(field):
    default = getattr(ParallelPlan(), field)
    other = ParallelPlan(**{**EVERYTHING, field: default})
    assert other != PLAN
    assert hash(other) != hash(PLAN)


def test_a_plan_survives_json_pickle_and_copy():
    assert ParallelPlan.from_dict(PLAN.to_dict()) == PLAN
    assert ParallelPlan.from_dict(json.loads(json.dumps(PLAN.to_dict()))) == PLAN
    assert ParallelPlan.from_dict(json.loads(str(PLAN))) == PLAN
    assert ParallelPlan.from_dict({}) == ParallelPlan()
    assert pickle.loads(pickle.dumps(PLAN)) == PLAN
    assert copy.deepcopy(PLAN) == PLAN


def test_to_dict_holds_plain_values_only():
    plain = PLAN.to_dict()
    assert plain["tied"] == [["embed.weight", "head.weight"]]
    assert plain["divided"] == {"decoder.blocks.*.attention": ["heads", "kv_heads"]}
    assert plain["batch"]["sequence_dims"] == {"text.ids": 2}
    assert list(plain) == [f.name for f in dataclasses.fields(ParallelPlan)]


def test_under_moves_every_name_of_the_model_and_no_name_of_the_batch():
    moved = PLAN.under("net.model")
    names = json.dumps({k: v for k, v in PLAN.to_dict().items() if k not in ("batch", "carried")})
    for name in ("decoder.", "embed", "norm", "rotary"):
        names = names.replace(f'"{name}', f'"net.model.{name}')
    names = names.replace('"head"', '"net.model.head"').replace('"head.', '"net.model.head.')
    expected = {**json.loads(names), "batch": PLAN.to_dict()["batch"], "carried": ["auxiliary"]}
    expected["positions"] = {"net.model.decoder": "position_ids", "net.model": "positions"}
    assert moved.to_dict() == expected
    assert PLAN.under("") == PLAN
    assert ParallelPlan().under("net") == ParallelPlan()
    assert PLAN.under("model").under("net") == moved


@pytest.mark.parametrize(
    ("pattern", "fqn", "matches"),
    [
        ("blocks.*.up", "blocks.3.up", True),
        ("blocks.*.up", "blocks.13.up", True),
        ("blocks.*.up", "blocks.3.up.linear", False),
        ("blocks.*", "blocks.3.up", False),
        ("*.up", "blocks.3.up", False),
        ("blocks.[02].up", "blocks.2.up", True),
        ("blocks.[02].up", "blocks.1.up", False),
        ("blocks.*.norm?", "blocks.0.norm2", True),
        ("Blocks.*", "blocks.0", False),
        ("head", "head", True),
        ("head", "heads", False),
    ],
)
def test_a_star_stands_for_exactly_one_component(pattern, fqn, matches):
    assert match_pattern(pattern, fqn) is matches


def test_the_outermost_offer_wins():
    inner = Offers("inner", model=Offers("innermost"))
    assert find_plan(Holds(net=inner)) == ParallelPlan(blocks="net.inner")
    assert find_plan(Offers("outer", net=inner)) == ParallelPlan(blocks="outer")


def test_nobody_offers_a_plan():
    assert find_plan(Holds(net=nn.Linear(2, 3))) is None


def test_an_offer_that_is_no_plan_is_refused():
    class Declines(nn.Module):
        def parallel_plan(self):
            return None

    with pytest.raises(
        PlanError, match=r"Declines.parallel_plan\(\) returned None, which is no Par"
    ):
        find_plan(Declines())


def test_two_offers_side_by_side_are_refused_by_name():
    model = Holds(generator=Offers("a"), critic=Offers("b", inner=Offers("c")))
    with pytest.raises(PlanError, match=r"2 submodules define.*generator, critic\..*model, Holds,"):
        find_plan(model)


def test_an_unknown_tensor_style_names_the_pattern_the_nearest_and_all_styles():
    with pytest.raises(PlanError, match=r"'head' the style 'colwize'.*'colwise'.*vocab_head"):
        ParallelPlan(tensor={"head": "colwize", "embed": "vocab_embedding"})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"first": "embed"}, r"first='embed'.*\('embed',\)"),
        ({"checkpointable": "mlp"}, r"checkpointable='mlp'.*\('mlp',\)"),
        ({"divided": {"attention": "heads"}}, r"divided\['attention'\]='heads'.*\('heads',\)"),
        ({"tied": ("embed.weight", "head.weight")}, r"tied\[0\]='embed.weight'"),
        (
            {"sequence_region": "block"},
            r"sequence_region='block' must be 'blocks', 'model' or 'none'",
        ),
    ],
)
def test_text_where_several_names_belong_is_refused(fields, message):
    with pytest.raises(PlanError, match=message):
        ParallelPlan(**fields)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensors": {}}, r"no field tensors\..* are blocks, first"),
        ({"batch": {"label": "y"}}, r"no field label\..*sequence_dims, labels, ignore_index"),
    ],
)
def test_from_dict_refuses_unknown_entries_by_name(values, message):
    with pytest.raises(PlanError, match=message):
        ParallelPlan.from_dict(values)


def test_a_negative_label_shift_is_refused():
    with pytest.raises(PlanError, match=r"label_shift=-2 must be 0 or more"):
        BatchLayout(label_shift=-2)


def test_several_containers_move_and_are_listed_in_order():
    plan = ParallelPlan(blocks=["encoder.layers", "decoder.layers"], kept=("encoder.layers.0",))
    assert plan.containers == plan.blocks == ("encoder.layers", "decoder.layers")
    moved = plan.under("net")
    assert moved.containers == ("net.encoder.layers", "net.decoder.layers")
    assert moved.kept == ("net.encoder.layers.0",)
    assert ParallelPlan.from_dict(moved.to_dict()) == moved
    assert ParallelPlan(blocks="layers").containers == ("layers",)
    assert ParallelPlan().containers == ()
