"""Laws of the parallel sizes: what "auto" gives, where ranks stand, what is refused."""

import itertools

import pytest

from lightning_par.errors import MeshError
from lightning_par.sizes import AXES, fit_sizes, ParallelSizes

SIZES = ParallelSizes(pipeline=2, data_replicate=3, data_shard=5, context=1, tensor=7)


def fit(devices, nodes=1, **options):
    return fit_sizes(num_devices=devices, devices_per_node=devices // nodes, **options)


def test_coordinates_count_from_the_innermost_axis():
    assert SIZES.shape == (2, 3, 5, 1, 7)
    assert (SIZES.world_size, SIZES.data) == (210, 15)
    places = [tuple(SIZES.coordinates(rank).values()) for rank in range(210)]
    assert places == list(itertools.product(*map(range, SIZES.shape)))
    assert list(SIZES.coordinates(0)) == list(AXES)


def test_data_rank_numbers_the_replicas_and_ignores_the_other_axes():
    ranks = [SIZES.data_rank(rank) for rank in range(210)]
    assert ranks == [rank // 7 % 15 for rank in range(210)]


@pytest.mark.parametrize("axes", [("tp",), ("pp",), ("dp_replicate", "dp_shard"), ("pp", "tp")])
def test_groups_part_the_ranks_and_differ_in_their_axes_only(axes):
    groups = SIZES.groups(axes)
    assert sorted(itertools.chain(*groups)) == list(range(210))
    for group in groups:
        assert group == sorted(group)
        kept = [{a: c for a, c in SIZES.coordinates(r).items() if a not in axes} for r in group]
        assert all(place == kept[0] for place in kept)
    sizes = dict(zip(AXES, SIZES.shape, strict=True))
    wanted = 1
    for axis in axes:
        wanted *= sizes[axis]
    assert {len(group) for group in groups} == {wanted}


def test_groups_by_hand():
    sizes = ParallelSizes(pipeline=2, tensor=3)
    assert sizes.groups(["tp"]) == [[0, 1, 2], [3, 4, 5]]
    assert sizes.groups(["pp"]) == [[0, 3], [1, 4], [2, 5]]
    assert sizes.groups(AXES) == [[0, 1, 2, 3, 4, 5]]
    assert sizes.groups([]) == [[rank] for rank in range(6)]


def test_sizes_print_the_axes_that_are_larger_than_one():
    assert str(ParallelSizes(pipeline=2, tensor=3)) == "pp 2 x tp 3"
    assert str(ParallelSizes()) == "1 device"


@pytest.mark.parametrize("value", [0, -3, 2.0, "2", True, None])
def test_sizes_refuse_what_is_not_a_whole_number_of_one_or_more(value):
    with pytest.raises(MeshError, match=rf"tensor={value!r} must be a whole number of 1 or more"):
        ParallelSizes(tensor=value)


def test_sizes_report_every_problem_at_once():
    with pytest.raises(MeshError, match=r"2 problems:\n.*pipeline=0.*\n.*data_shard=-1"):
        ParallelSizes(pipeline=0, data_shard=-1)


# rule -> devices -> (pp, dp, tp) on one node
AUTO = {
    "balanced": {
        1: (1, 1, 1),
        2: (1, 1, 2),
        3: (1, 3, 1),
        4: (2, 1, 2),
        6: (1, 3, 2),
        8: (2, 2, 2),
        16: (2, 4, 2),
    },
    "tensor": {n: (1, 1, n) for n in (1, 2, 3, 4, 6, 8, 16)},
    "pipeline": {n: (n, 1, 1) for n in (1, 2, 3, 4, 6, 8, 16)},
    "data": {n: (1, n, 1) for n in (1, 2, 3, 4, 6, 8, 16)},
}


@pytest.mark.parametrize(
    ("rule", "devices"), [(rule, devices) for rule in AUTO for devices in AUTO[rule]]
)
def test_auto_gives_the_documented_sizes(rule, devices):
    sizes = fit(devices, auto=rule)
    assert (sizes.pipeline, sizes.data, sizes.tensor) == AUTO[rule][devices]
    assert sizes.world_size == devices


def test_auto_tensor_stays_inside_a_node_and_the_rest_is_data():
    sizes = fit(24, nodes=4, auto="tensor")
    assert (sizes.tensor, sizes.data) == (6, 4)
    assert fit(24, nodes=4, auto="tensor", tensor=3).data == 8
    assert fit(10, nodes=2, auto="balanced") == ParallelSizes(pipeline=2, data_shard=5)
    assert fit(8, nodes=2, tensor=8, tensor_across_nodes=True) == ParallelSizes(tensor=8)


def test_given_sizes_leave_the_rest_to_auto():
    assert fit(12, pipeline=3) == ParallelSizes(pipeline=3, tensor=2, data_shard=2)
    assert fit(12, auto="pipeline", data=3) == ParallelSizes(pipeline=4, data_shard=3)
    assert fit(12, auto="tensor", context=3) == ParallelSizes(tensor=4, context=3)
    assert fit(12, auto="context", data=3) == ParallelSizes(context=4, data_shard=3)
    assert fit(16, nodes=2, auto="context", tensor=2) == ParallelSizes(context=8, tensor=2)
    assert {fit(8, auto=rule).context for rule in ("tensor", "pipeline", "balanced", "data")} == {1}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stage_0_replicates_and_the_others_shard(stage):
    sizes = fit(6, auto="data", zero_stage=stage)
    assert (sizes.data_replicate, sizes.data_shard) == ((6, 1) if stage == 0 else (1, 6))
    if stage:
        hybrid = fit(6, auto="data", zero_stage=stage, data_replicate=2)
        assert (hybrid.data_replicate, hybrid.data_shard) == (2, 3)


ACROSS = r", or tensor_parallel_across_hosts=True, which is slow\. \[lightning-par explain LP103\]$"
REFUSED = {
    "zero": (
        {"devices": 4, "tensor": 0},
        r"^tensor_parallel_size=0 must be a whole number of 1 or more, or 'auto'\. "
        r"\[lightning-par explain LP101\]$",
    ),
    "negative": ({"devices": 4, "data": -2}, r"data_parallel_size=-2 must be a whole number"),
    "text": ({"devices": 4, "pipeline": "2"}, r"pipeline_parallel_size='2' must be a whole"),
    "bool": ({"devices": 4, "data_replicate": True}, r"data_parallel_replicate_size=True must"),
    "fraction": ({"devices": 4, "tensor": 2.0}, r"tensor_parallel_size=2\.0 must be a whole"),
    "several": (
        {"devices": 4, "tensor": 0, "pipeline": "x", "zero_stage": 4},
        r"3 problems:\n.*size=0.*\n.*size='x'.*\n.*zero_stage=4 must be 0, 1, 2 or 3",
    ),
    "not a divisor": (
        {"devices": 4, "tensor": 3},
        r"tensor_parallel_size=3 needs 3 devices or a multiple, but the Trainer has 4.*"
        r"Use 3 or 6 devices, or sizes whose product is one of 1, 2 or 4\. "
        r"\[lightning-par explain LP102\]$",
    ),
    "product": (
        {"devices": 6, "tensor": 2, "pipeline": 2},
        r"tensor_parallel_size=2 x pipeline_parallel_size=2 needs 4 devices or a multiple, but "
        r"the Trainer has 6\. Use 4 or 8 devices, or sizes whose product is one of 1, 2, 3 or 6",
    ),
    "too few": (
        {"devices": 2, "tensor": 2, "pipeline": 3},
        r"needs 6 devices or a multiple, but the Trainer has 2\. Use 6 devices",
    ),
    "one device": (
        {"devices": 1, "tensor": 2},
        r"needs 2 devices.*has 1\. Use 2 devices.*on the CPU, devices='auto' means 1",
    ),
    "too many given": (
        {"devices": 8, "tensor": 2, "pipeline": 1, "data": 2},
        r"tensor_parallel_size=2 x pipeline_parallel_size=1 x data_parallel_size=2 needs exactly "
        r"4 devices, but the Trainer has 8\. Use 4 devices, or data_parallel_size=4 or 'auto'\. "
        r"\[lightning-par explain LP102\]$",
    ),
    "data given": (
        {"devices": 8, "data": 1},
        r"data_parallel_size=1 \(with tensor_parallel_size=2 and pipeline_parallel_size=2, chosen "
        r"by 'auto'\) needs exactly 4 devices, but the Trainer has 8\. Use 4 devices, or "
        r"data_parallel_size=2 or 'auto'\. \[lightning-par explain LP102\]$",
    ),
    "beyond a node": (
        {"devices": 8, "nodes": 2, "tensor": 8},
        rf"tensor_parallel_size=8 does not divide the 4 devices of .*one of 1, 2 or 4{ACROSS}",
    ),
    "across nodes": (
        {"devices": 8, "nodes": 4, "tensor": 4},
        rf"tensor_parallel_size=4 does not divide the 2 devices of a node.*one of 1 or 2{ACROSS}",
    ),
    "replicas": (
        {"devices": 6, "auto": "data", "data_replicate": 4},
        r"data_parallel_replicate_size=4 does not divide data_parallel_size=6.*1, 2, 3 or 6\. "
        r"\[lightning-par explain LP103\]$",
    ),
    "replicas at stage 0": (
        {"devices": 6, "auto": "data", "data_replicate": 2, "zero_stage": 0},
        r"data_parallel_replicate_size=2 has no effect .*the 6 replicas.*zero_stage=1, 2 or 3",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(case):
    options, message = REFUSED[case]
    with pytest.raises(MeshError, match=message):
        fit(**options)
