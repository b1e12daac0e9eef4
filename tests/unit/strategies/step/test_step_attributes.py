"""What a step changes in attributes on the last stage of a pipeline, other stages take over."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_par.strategies.components.step_attributes import StepAttributes


class Module(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recent = [torch.zeros(2)] * 40
        self.last: list[Any] = [torch.zeros(2)]
        self.numbers = [1, 2, 3]
        self.nested = [[1], [2]]
        self.alias = self.recent


def replaces_an_entry(module: Module) -> None:
    module.recent[37] = torch.ones(2)


def replaces_all_entries(module: Module) -> None:
    module.last.clear()
    module.last.append(torch.ones(2))


def drops_the_first_entry(module: Module) -> None:
    module.recent.pop(0)
    module.recent.append(torch.ones(2))


def replaces_and_appends(module: Module) -> None:
    module.numbers[1] = 7
    module.numbers.append(4)


def sorts(module: Module) -> None:
    module.numbers.sort(reverse=True)


def replaces_in_depth(module: Module) -> None:
    module.nested[0][0] = 5
    module.nested[1] = [6, 7]


def drops(module: Module) -> None:
    module.recent.pop()
    module.last.pop()


@pytest.mark.parametrize(
    "change",
    [
        replaces_an_entry,
        replaces_all_entries,
        drops_the_first_entry,
        replaces_and_appends,
        sorts,
        replaces_in_depth,
        drops,
    ],
)
@pytest.mark.parametrize("own", [lambda module: None, replaces_and_appends, replaces_an_entry])
def test_another_stage_has_what_the_last_one_has(
    change: Callable[[Module], None], own: Callable[[Module], None]
) -> None:
    last = Module()
    other = copy.deepcopy(last)
    stages = StepAttributes(last), StepAttributes(other)
    for stage in stages:
        stage.begin()
    change(last)
    own(other)
    changes = stages[0].changes()
    assert changes
    stages[1].take(changes, is_source=False)
    names = {name for _, name in changes}
    assert names
    for name in names:
        torch.testing.assert_close(getattr(other, name), getattr(last, name))
    if change is not drops:  # a list of the same length is the same list
        assert other.alias is other.recent


def test_a_step_that_changes_nothing_says_nothing() -> None:
    module = Module()
    stage = StepAttributes(module)
    stage.begin()
    module.recent[3] = module.recent[3]
    assert stage.changes() == {}


def test_a_stage_that_has_fewer_entries_takes_those_that_it_has() -> None:
    """An entry that cannot be sent, such as a generator, is on the last stage only."""
    last, other = Module(), Module()
    last.numbers.append(n for n in range(3))  # type: ignore[arg-type]
    stages = StepAttributes(last), StepAttributes(other)
    for stage in stages:
        stage.begin()
    last.numbers[0], last.numbers[3] = 8, 9
    stages[1].take(stages[0].changes(), is_source=False)
    assert other.numbers == [8, 2, 3]
