"""A mode is taken off for a while, if it is the innermost one."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lightning_par.strategies.hooks.innermost_mode import asks_innermost, without_mode


class Noting(TorchFunctionMode):
    """Notes the functions that it passes on."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if asks_innermost(func):
            return args[0] is self
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


def test_the_innermost_mode_sees_nothing_and_then_everything_again() -> None:
    with Noting() as outer, Noting() as mode:
        with without_mode(mode):
            torch.ones(2)
        assert (outer.seen, mode.seen) == ([torch.ones], [])
        torch.zeros(2)
        assert (outer.seen, mode.seen) == ([torch.ones, torch.zeros], [torch.zeros])


def test_a_mode_below_another_one_stays() -> None:
    with Noting() as mode, torch.device("meta"), without_mode(mode):
        made = torch.ones(2)
    assert torch.ones in mode.seen
    assert made.is_meta


def test_without_any_mode_nothing_changes() -> None:
    with without_mode(Noting()):
        assert torch.ones(2).sum() == 2
