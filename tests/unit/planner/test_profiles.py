"""Device profiles: every shipped number has a source, and a bad file is refused with its cause."""

import json
from pathlib import Path

import pytest

from lightning_par.errors import ConfigurationError
from lightning_par.planner.constants import Constants
from lightning_par.planner.profiles import device_names, implementation, load_profile, reached
from lightning_par.planner.shapes import Layout, TransformerShape
from lightning_par.planner.step_time import make_clock, predict_step
from lightning_par.sizes import ParallelSizes

OWN = {
    "flops": 1e14,
    "flops_source": "measured",
    "processors": 80,
    "processors_source": "measured",
    "bandwidth": 9e11,
    "bandwidth_source": "measured",
    "memory": 3.2e10,
    "memory_source": "measured",
    "link": "pcie4",
    "network": "mine",
}


def write(folder: Path, **changes: object) -> Path:
    entry = {key: value for key, value in {**OWN, **changes}.items() if value is not None}
    networks = {"mine": {"bandwidth": 1e9, "source": "measured"}}
    path = folder / "own.json"
    path.write_text(json.dumps({"devices": {"v100": entry}, "networks": networks}))
    return path


def test_the_devices_of_the_mission_are_shipped() -> None:
    assert {"a100-40", "a100-80", "h100", "h200", "gh200", "b200"} <= {*device_names()}
    for name in device_names():
        device = load_profile(name)
        assert device.link > device.network > 0
        assert device.memory > 0


def test_numbers_are_those_of_the_file() -> None:
    device = load_profile("h100")
    assert (device.flops, device.fp8_flops, device.memory) == (989e12, 1979e12, 80e9)
    assert (device.link, device.network, device.node) == (450e9, 50e9, 8)
    assert load_profile("a100-80").fp8_flops == 0
    assert load_profile("gh200").node == 1


def test_an_own_file_is_read_beside_the_shipped_one(tmp_path: Path) -> None:
    path = write(tmp_path, node=4, node_source="counted")
    device = load_profile("v100", path)
    assert (device.flops, device.link, device.network, device.node) == (1e14, 32e9, 1e9, 4)
    assert load_profile("h100", path) == load_profile("h100")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"flops": -1}, "flops=-1 must be a number greater than 0"),
        ({"memory": None}, "memory=None must be a number greater than 0"),
        ({"flops_source": None}, "flops=100000000000000.0 has no flops_source"),
        ({"link": "pcie9"}, "link='pcie9' is not one of the 'networks'; did you mean 'pcie"),
        ({"memori": 3}, "'memori' is unknown; did you mean 'memory'?"),
    ],
)
def test_a_bad_profile_is_refused(tmp_path: Path, changes: dict, words: str) -> None:
    with pytest.raises(ConfigurationError, match="device v100") as caught:
        load_profile("v100", write(tmp_path, **changes))
    assert words in str(caught.value)


def test_a_name_without_profile_and_a_file_without_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"no profile of the device 'h10'; did you mean 'h100'\?"
    ):
        load_profile("h10")
    with pytest.raises(ConfigurationError, match=r"'A100'.* mean 'a100-40' or 'a100-80'"):
        load_profile("A100")
    with pytest.raises(
        ConfigurationError, match=r"no profile of the device 'v100'\. The devices .* a100-40, "
    ):
        load_profile("v100")
    path = tmp_path / "own.json"
    with pytest.raises(ConfigurationError, match="cannot be read"):
        load_profile("h100", path)
    path.write_text("[]")
    with pytest.raises(ConfigurationError, match="has no valid entry 'devices'"):
        load_profile("h100", path)


CALIBRATION = {
    "constants": dict.fromkeys(Constants.__dataclass_fields__, 1.0),
    "attention_rates": [0.5, 0.4],
    "slowdown": [1.0, 1.2, 1.6],
    "overlaps": False,
}


def test_what_was_measured_is_read_and_used(tmp_path: Path) -> None:
    device = load_profile("v100", write(tmp_path, calibration=CALIBRATION))
    assert device.calibration is not None
    assert reached(device).product == 1.0
    assert [device.calibration.crowding(busy) for busy in (0.5, 1, 1.5, 3, 8)] == [
        *(1.0, 1.0),
        pytest.approx(1.1),
        *(1.6, 1.6),
    ]
    assert [device.calibration.wait(busy) for busy in (1, 2, 8)] == [0.0, 0.0, 0.0]


def test_profiles_of_older_versions_have_one_wait_for_all_groups(tmp_path: Path) -> None:
    later = ("network_part_wait", "stage_start")
    constants = {k: v for k, v in CALIBRATION["constants"].items() if k not in later}
    constants["network_wait"] = 0.125
    path = write(tmp_path, calibration={**CALIBRATION, "constants": constants})
    found = reached(load_profile("v100", path))
    assert (found.network_part_wait, found.stage_start) == (0.125, 0.0)


WAIT = 0.25
SHAPE = TransformerShape(layers=2, model_dim=64, heads=4, length=128, vocab=256)


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        # Gathers and scatters both ways, of two layers' two sums, of embedding and head.
        ({"tensor": 2}, 2 * 8 + 4),
        ({"data_shard": 2}, 2 * (2 + 1)),  # gradients and weights: of every block, of the rest
        ({"data_replicate": 2}, 1),  # gradients, in one bucket
        # Forward and backward, on the pipeline's longest way, and the table of the outer stages.
        ({"pipeline": 2}, 2 * (2 + 2 - 1) + 1),
        ({}, 0),
    ],
)
def test_every_collective_and_message_waits_where_ranks_do(
    tmp_path: Path, sizes: dict, count: int
) -> None:
    constants = {**CALIBRATION["constants"], "host": 1e-9, "kernel": 1e-9, "link_start": 1e-9}
    calibration = {**CALIBRATION, "constants": constants, "slowdown": [1.0]}

    def seconds(**changes: object) -> float:
        path = write(tmp_path, calibration={**calibration, **changes})
        device = load_profile("v100", path)
        code = implementation("32-true", device)
        made = ParallelSizes(**sizes)
        layout = Layout(
            sizes=made, microbatches=made.pipeline, zero_stage=1 if made.data_shard > 1 else 0
        )
        return predict_step(SHAPE, layout, device, code).seconds

    alone = seconds()
    assert seconds(waits=[WAIT, WAIT]) - alone == pytest.approx(count * WAIT)
    assert seconds(waits=[0.0, 0.0]) == alone


LINES = {"all_gather": [[0.5, 1e9]], "message": [[0.125, 1e6]]}


def test_messages_and_collectives_take_what_was_measured_of_them(tmp_path: Path) -> None:
    """Collectives begin sooner in a step than in a loop; messages were measured one by one."""
    calibration = {**CALIBRATION, "slowdown": [1.0], "waits": [-0.25], "collectives": LINES}
    device = load_profile("v100", write(tmp_path, calibration=calibration))
    clock = make_clock(device, reached(device), implementation("32-true", device), 1.0)
    assert clock.message(1e6, between_nodes=False) == 0.125 + 1.0
    assert clock.collective("all_gather", 2e9, 2, inside=2) == 0.5 - 0.25 + 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"constants": {}},
        {"slowdown": []},
        {"attention_rates": [0.5]},
        {"slowdown": [-1]},
        {"constants": {**CALIBRATION["constants"], "stage_start": -1}},
        {"waits": [-1]},
        {"waits": [-0.6], "collectives": LINES},
        {"eager": -1},
        {"exchange": [-1]},
        {"collectives": {"all_gather": [1]}},
    ],
)
def test_a_damaged_calibration_is_refused(tmp_path: Path, changes: dict) -> None:
    path = write(tmp_path, calibration={**CALIBRATION, **changes})
    with pytest.raises(ConfigurationError, match="Write it again with lightning-par calibrate"):
        load_profile("v100", path)


def test_precision_says_what_a_parameter_takes() -> None:
    """Bytes of weights, gradients and the two moments of Adam, and of an activation."""
    device = load_profile("cpu")
    held = {
        name: (code.weight_bytes, code.gradient_bytes, code.state_bytes, code.activation_bytes)
        for name in ("64-true", "32-true", "bf16-mixed", "bf16-true")
        for code in [implementation(name, device)]
    }
    assert held["64-true"] == (8, 8, 16, 8)
    assert held["32-true"] == (4, 4, 8, 4)
    assert held["bf16-mixed"] == (4, 4, 8, 2)
    assert held["bf16-true"] == (2, 2, 4, 2)
