"""Every file in configs/clusters is a run whose ranks start: one of each is rehearsed."""

import re
from pathlib import Path

import pytest
import yaml

from lightning_par.commands.rehearse import rehearse_config
from lightning_par.observe.live_bytes import ACTIVATIONS, GRADIENTS, OPTIMIZER, PARAMETERS
from lightning_par.planner.profiles import load_profile
from tests.support.exhaustive import some

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs/clusters").glob("*.yaml"))
AXES = {"tensor": "tp", "pipeline": "pp", "data": "dp_shard", "expert": "ep"}

pytestmark = pytest.mark.contract


def degrees_of(written):
    options = written["trainer"]["strategy"]["init_args"]
    return {axis: options.get(f"{axis}_parallel_size", 1) for axis in AXES}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.stem)
def test_a_cluster_is_called_by_its_model_and_has_as_many_devices_as_ranks(config: Path) -> None:
    text = config.read_text()
    written = yaml.safe_load(text)
    degrees = degrees_of(written)
    ranks = degrees["tensor"] * degrees["pipeline"] * degrees["data"]
    assert ranks == written["trainer"]["num_nodes"] * written["trainer"]["devices"]
    preset = written["model"]["init_args"]["preset"].replace("-", "_")
    assert config.stem == f"{preset}_hybrid3d_{ranks}"
    axes = [axis for axis in ("tensor", "pipeline", "data") if degrees[axis] > 1]
    said = " x ".join(f"{axis} {degrees[axis]}" for axis in axes)
    assert re.search(rf"^# Ranks: {ranks} \({said}\b", text, re.MULTILINE)


def assert_rehearsed(config: Path, *, is_last: bool = True, **changed: int) -> None:
    """Rehearse an end rank of a cluster, which has to fit a card of 80 GB; `changed`: options of
    the strategy, model and data.
    """
    written = yaml.safe_load(config.read_text())
    num_nodes, devices = written["trainer"]["num_nodes"], written["trainer"]["devices"]
    places = {
        "num_microbatches": "trainer.strategy.init_args",
        "num_layers": "model.init_args.overrides",
        "batch_size": "data.init_args",
    }
    rest = [f"--{places[name]}.{name}={value}" for name, value in changed.items()]
    found = rehearse_config(
        [f"--config={config}", *rest],
        num_nodes=num_nodes,
        devices=devices,
        rank=(num_nodes * devices - 1) * is_last,
    )
    degrees = degrees_of(written)
    several = [axis for axis in ("pipeline", "data", "tensor") if degrees[axis] > 1]
    place = [f"{AXES[axis]} {(degrees[axis] - 1) * is_last}" for axis in several]
    assert f"({', '.join(place)}" in found.place
    assert found.peak < load_profile("h100").memory
    # With ZeRO 3 and one stage the peak is at the loss, before the first gradient.
    sharded = written["trainer"]["strategy"]["init_args"].get("zero_stage") == 3
    gradients = set() if sharded and degrees["pipeline"] == 1 else {GRADIENTS}
    assert set(found.memory) >= {ACTIVATIONS, OPTIMIZER, PARAMETERS} | gradients
    sent = {entry.axis.partition(" ")[0] for entry in found.volume}
    assert sent >= {AXES[axis] for axis, degree in degrees.items() if degree > 1}
    assert found.host_bytes < 4 * 2**30


LARGE = [config for config in CONFIGS if re.match(r"llama3|mt_nlg|mixtral_8x22b", config.stem)]
"""Others have the same axes and models; all of them run a whole step below."""


@pytest.mark.parametrize("config", some(CONFIGS, LARGE), ids=lambda p: p.stem)
def test_a_rank_of_the_cluster_starts_with_a_block_in_every_stage(config: Path) -> None:
    """Its widths, its mesh and its sequences; two micro-batches."""
    stages = degrees_of(yaml.safe_load(config.read_text()))["pipeline"]
    assert_rehearsed(config, num_layers=stages, num_microbatches=2, batch_size=2)


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("config", some(CONFIGS, CONFIGS), ids=lambda p: p.stem)
def test_a_rank_of_the_cluster_runs_a_step(config: Path, is_last: bool) -> None:
    assert_rehearsed(config, is_last=is_last)
