"""Laws of the ranks that divide experts."""

from lightning_par.sizes import EXPERT_AXES, fit_sizes, ParallelSizes


def test_experts_are_divided_among_neighbors_that_shard():
    sizes = ParallelSizes(
        pipeline=2, data_replicate=3, data_shard=4, context=5, tensor=7, expert=10
    )
    assert dict(zip(EXPERT_AXES, sizes.expert_shape, strict=True)) == {
        "pp": 2,
        "expert_replicate": 3,
        "expert_shard": 2,
        "ep": 10,
        "tp": 7,
    }


def test_experts_are_divided_among_all_replicas_where_nothing_is_sharded():
    sizes = fit_sizes(
        num_devices=12, devices_per_node=12, tensor=1, pipeline=1, expert=4, zero_stage=0
    )
    assert (sizes.data_replicate, sizes.data_shard) == (12, 1)
    assert sizes.expert_shape == (1, 3, 1, 4, 1)


def test_auto_divides_no_experts():
    sizes = fit_sizes(num_devices=4, devices_per_node=4)
    assert sizes.expert == 1
    assert sizes.expert_shape[3] == 1
