"""A layout as settings of a run: every option that makes it, and the user's others kept."""

from lightning_par.planner.run_settings import apply_layout, without_layout
from lightning_par.planner.shapes import Layout
from lightning_par.sizes import ParallelSizes
from lightning_par.strategies.options import MeshOptions

RICH = Layout(
    sizes=ParallelSizes(pipeline=2, data_replicate=2, data_shard=4, context=2, tensor=2, expert=4),
    micro_batch=3,
    microbatches=8,
    zero_stage=2,
    schedule="interleaved",
    virtual=3,
    recompute="selective",
    sequence_parallel=False,
    offload=True,
    expert_max_rows=96,
    blocks=(1, 2, 2, 2, 2, 1),
)


def test_the_strategy_makes_the_sizes_of_the_layout() -> None:
    for layout in (RICH, Layout(sizes=ParallelSizes(data_replicate=4), zero_stage=0)):
        options = MeshOptions(**layout.options())
        world = layout.sizes.world_size
        assert options.fit_sizes(world, 8) == layout.sizes
        assert options.zero_stage == layout.zero_stage
        assert options.sequence_parallel == layout.sequence_parallel
        assert (options.offload_options is not None) == layout.offload
        assert options.expert_max_rows == layout.expert_max_rows
    options = MeshOptions(**RICH.options())
    assert options.place_stages(2) == RICH.owners
    assert options.microbatches(2) == 8
    assert tuple(options.stage_blocks) == RICH.blocks
    again = Layout.from_options(options, RICH.sizes, 24, recompute=RICH.recompute)
    assert again == RICH


def test_batches_are_cut_by_the_pipeline_or_accumulated() -> None:
    user = {"seed_everything": 3, "data": {"class_path": "a.B", "init_args": {"length": 7}}}
    piped = apply_layout(user, RICH, nodes=4, devices=8)
    assert piped["data"]["init_args"] == {"length": 7, "batch_size": 24}
    assert piped["trainer"]["accumulate_grad_batches"] == 1
    assert (piped["trainer"]["num_nodes"], piped["trainer"]["devices"]) == (4, 8)
    assert piped["seed_everything"] == 3
    flat = Layout(sizes=ParallelSizes(data_shard=4), micro_batch=3, microbatches=8)
    plain = apply_layout(user, flat, nodes=1, devices=4)
    assert plain["data"]["init_args"]["batch_size"] == 3
    assert plain["trainer"]["accumulate_grad_batches"] == 8
    assert user == {"seed_everything": 3, "data": {"class_path": "a.B", "init_args": {"length": 7}}}


def test_recomputation_replaces_the_users_and_keeps_other_callbacks() -> None:
    name = "lightning_par.callbacks.ActivationCheckpointing"
    other = {"class_path": "a.Other"}
    user = {"trainer": {"callbacks": [other, {"class_path": name, "init_args": {"mode": "full"}}]}}
    found = apply_layout(user, RICH, nodes=1, devices=8)["trainer"]["callbacks"]
    assert found == [other, {"class_path": name, "init_args": {"mode": "selective"}}]
    none = apply_layout(user, Layout(), nodes=1, devices=1)["trainer"]["callbacks"]
    assert none == [other]


def test_arguments_that_would_replace_the_layout_are_left_out() -> None:
    of_layout = ["--trainer.strategy=hybrid3d", "--trainer.strategy.init_args.zero_stage", "1"]
    of_layout += ["--trainer.devices", "4", "--data.init_args.batch_size=8", "--data.batch_size=8"]
    others = ["--model", "gpt.yaml", "--trainer.precision=bf16-mixed", "--data.init_args.length=9"]
    assert without_layout([*of_layout, *others]) == others
    assert without_layout([*others, *of_layout]) == others
