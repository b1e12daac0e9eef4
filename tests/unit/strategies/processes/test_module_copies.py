"""A copy of a module is found by the names of its parameters, and blamed for what a hook raises."""

import copy

import pytest
from torch import nn

from lightning_par.errors import ConfigurationError, PipelineError
from lightning_par.strategies.processes.module_copies import explain_copy, find_copy


class _Holder(nn.Module):
    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)


def names(**parts: nn.Module) -> list[str]:
    return [name for name, _ in _Holder(**parts).named_parameters()]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))


@pytest.mark.parametrize(
    ("parts", "found"),
    [
        (lambda n: {"net": n, "average": copy.deepcopy(n)}, ("net", "average")),
        (lambda n: {"net": n, "average": _Holder(module=n, count=n)}, None),  # the same parameters
        (
            lambda n: {"net": n, "average": _Holder(module=copy.deepcopy(n))},
            ("net", "average.module"),
        ),
        (lambda n: {"blocks": nn.ModuleList([n, copy.deepcopy(n)])}, None),
        (lambda n: {"net": n, "head": nn.Linear(2, 2)}, None),
    ],
)
def test_copies_are_found(parts, found) -> None:
    assert find_copy(names(**parts(net()))) == found


def test_errors_of_a_hook_name_both_modules() -> None:
    told = explain_copy(KeyError("0.weight"), ("net", "average"))
    assert isinstance(told, ConfigurationError)
    assert "'net' and its copy 'average'" in str(told)
    assert "KeyError: '0.weight'" in str(told)
    assert explain_copy(PipelineError("LP406", "other"), ("net", "average")) is None
    assert explain_copy(KeyboardInterrupt(), ("net", "average")) is None
