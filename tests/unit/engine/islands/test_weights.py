"""The outer step, and what encoding leaves out, against their definitions."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_par.dtensor import Box
from lightning_par.engine.data.islands.coding import encode, whole_box
from lightning_par.engine.data.islands.options import Outer
from lightning_par.engine.data.islands.weights import load_weights, SharedWeights

SHAPES = {"a": (7, 5), "b": (300,), "c": (3, 2, 11), "frozen": (2,)}
TRAINED = ["a", "b", "c"]


def start() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(3)
    return {n: torch.randn(s, generator=draw, dtype=torch.float64) for n, s in SHAPES.items()}


def movements(round_number: int, names: list[str]) -> list[tuple[float, list[tuple[Box, Tensor]]]]:
    """Two islands; the second one sends every tensor in two boxes."""
    draw = torch.Generator().manual_seed(100 + round_number)
    moved = [
        {n: torch.randn(SHAPES[n], generator=draw, dtype=torch.float64) for n in names}
        for _ in range(2)
    ]
    first = [(whole_box(n, SHAPES[n]), moved[0][n]) for n in names]
    second = []
    for n in names:
        rest = SHAPES[n][1:]
        for low, size in ((0, 2), (2, SHAPES[n][0] - 2)):
            box = Box(n, (low, *[0] * len(rest)), (size, *rest))
            second.append((box, moved[1][n][low : low + size]))
    return [(0.25, first), (0.75, second)]


def mean_of(number: int, name: str) -> Tensor:
    found = torch.zeros(SHAPES[name], dtype=torch.float64)
    for weight, boxes in movements(number, TRAINED):
        found += weight * torch.cat([v for box, v in boxes if box.name == name])
    return found


@pytest.mark.parametrize("optimizer", ["nesterov", "average", "sgd"])
def test_outer_optimizer_equals_its_definition(optimizer: str) -> None:
    rates = {"nesterov": (0.6, 0.8), "average": (1.0, 0.0), "sgd": (0.6, 0.8)}
    lr, mu = rates[optimizer]
    given = {} if optimizer == "average" else {"lr": lr, "momentum": mu}
    outer = Outer(optimizer=optimizer, quantize="none", **given)
    shared, wanted = SharedWeights(outer, start(), TRAINED, "era"), start()
    momenta = {n: torch.zeros(SHAPES[n], dtype=torch.float64) for n in TRAINED}
    for number in range(4):
        shared.merge(0, movements(number, TRAINED))
        for n in TRAINED:
            g = mean_of(number, n)
            momenta[n] = mu * momenta[n] + g
            wanted[n] -= lr * (g + mu * momenta[n] if optimizer == "nesterov" else momenta[n])
    torch.testing.assert_close(shared.shown, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["bf16", "int8", "int4"])
def test_what_an_update_leaves_out_is_part_of_the_next(kind: str) -> None:
    shared = SharedWeights(Outer(quantize=kind), start(), TRAINED, "era")
    exact = SharedWeights(Outer(quantize="none"), start(), TRAINED, "era")
    islands = start()
    for number in range(6):
        before = {n: shared.shown[n].clone() for n in TRAINED}
        updates, _ = shared.merge(0, movements(number, TRAINED))
        exact.merge(0, movements(number, TRAINED))
        for n, update in updates.items():
            wanted = encode(shared.exact[n] - before[n], kind).values(torch.float64)
            assert torch.equal(update.values(torch.float64), wanted)
        for n, update in updates.items():
            islands[n] += update.values(torch.float64)
    assert all(torch.equal(islands[n], shared.shown[n]) for n in SHAPES)
    torch.testing.assert_close(shared.exact, exact.exact, rtol=0, atol=1e-12)
    for n in TRAINED:  # less than a step of the code of one update, however many there were
        bound = {"bf16": 2**-7, "int8": 1 / 127, "int4": 1 / 7}[kind] * 8
        assert (shared.exact[n] - shared.shown[n]).abs().max() < bound


def test_fragments_divide_the_trained_weights_and_change_alone() -> None:
    shared = SharedWeights(Outer(fragments=2, quantize="none"), start(), TRAINED, "era")
    names = [fragment.names for fragment in shared.fragments]
    assert names == [["b"], ["c", "a"]]
    shared.merge(1, movements(0, ["a", "c"]))
    same = {n for n, value in start().items() if torch.equal(shared.shown[n], value)}
    assert same == {"b", "frozen"}
    assert [fragment.version for fragment in shared.fragments] == [0, 1]


@pytest.mark.parametrize("kind", ["none", "int8"])
def test_saved_weights_go_on_bit_for_bit(kind: str, tmp_path: Path) -> None:
    outer = Outer(fragments=2, quantize=kind)
    straight = SharedWeights(outer, start(), TRAINED, "era")
    for number in range(2):
        straight.save(tmp_path, number)
    for number in (0, 1, 0):
        straight.merge(number, movements(number, straight.fragments[number].names))
        straight.fragments[number].counted["1"] = f"ticket {number}"
        straight.step += 7
        straight.save(tmp_path, number)
    again = load_weights(tmp_path)
    assert again is not None
    assert [vars(f) for f in again.fragments] == [vars(f) for f in straight.fragments]
    assert (again.era, again.step, again.outer) == ("era", 21, outer)
    for shared in (straight, again):
        shared.merge(1, movements(5, shared.fragments[1].names))
    for name in SHAPES:
        assert torch.equal(again.exact[name], straight.exact[name])
        assert torch.equal(again.shown[name], straight.shown[name])
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "fragment-0-of-2.safetensors",
        "fragment-1-of-2.safetensors",
    ]


def test_a_run_that_had_not_begun_is_not_loaded(tmp_path: Path) -> None:
    assert load_weights(tmp_path) is None
    SharedWeights(Outer(fragments=2), start(), TRAINED, "era").save(tmp_path, 0)
    assert load_weights(tmp_path) is None
    SharedWeights(Outer(fragments=2), start(), TRAINED, "another").save(tmp_path, 1)
    assert load_weights(tmp_path) is None
