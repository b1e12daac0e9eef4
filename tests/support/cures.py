"""Modules that a mesh refuses, each with the same module as the refusal advises, which is equal.

CURES = Cures(__name__)
CASES = CURES.cases

@CURES.add("LP408", "on another pipeline stage.*replicated=", replicated=("net.emb",))
def penalty_of_the_embedding(cured):
    return Module()

@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_refused_without_the_cure_and_equal_with_it(case, layout, refusal):
    CURES.check(case, layout, refusal)
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.ranks.api import RankError
from tests.support.user_code import Cases

__all__ = ["Cures"]

_Make = Callable[[bool], nn.Module | tuple[Any, ...]]


class Cures:
    """The cases of a test file.

    Args:
        file: Its ``__name__``.

    Attributes:
        cases: Two for each decorated function: without the cure, and ``..._cured``.
    """

    def __init__(self, file: str) -> None:
        self.cases = Cases(file)

    def add(
        self,
        code: str,
        refusal: str,
        layout: str = "pp2",
        *,
        styles: Mapping[str, str | None] | None = None,
        options: Mapping[str, Any] | None = None,
        **plan: Any,
    ) -> Callable[[_Make], _Make]:
        """Add a case without its cure and one with it.

        The decorated function takes whether to apply the cure, and returns a net of `PlainModule`,
        or a LightningModule derived from it. Where the cure is in the data, it returns a tuple of
        that, the samples, and, if they need one, the `collate_fn`.

        Args:
            code: Of the refusal.
            refusal: Pattern of the refusal, which names the cure.
            layout: On which it is refused without the cure, and equal with it.
            styles: What the cure changes in the tensor styles of the plan; None: nothing is left.
            options: Other fields of `Case`, of both.
            plan: What the cure changes in the plan.
        """

        def decorate(make: _Make) -> _Make:
            def case(cured: bool) -> Any:
                given = make(cured)
                made, *data = given if isinstance(given, tuple) else (given, token_pairs())
                module: Any = made if isinstance(made, PlainModule) else PlainModule(made)
                own = module.parallel_plan()
                if not layout.startswith("tp"):
                    own = replace(own, tensor={})
                if cured and styles:
                    changed = {**own.tensor, **styles}
                    own = replace(own, tensor={n: s for n, s in changed.items() if s is not None})
                own = replace(own, **(plan if cured else {}))
                module.parallel_plan = lambda: own
                return module, *data

            def refused() -> Any:
                return case(False)

            def equal() -> Any:
                return case(True)

            refused.__name__, equal.__name__ = make.__name__, f"{make.__name__}_cured"
            self.cases.add(refused={layout: f"(?s){refusal}.*explain {code}"}, **(options or {}))(
                refused
            )
            self.cases.add(equal=layout, **(options or {}))(equal)
            return make

        return decorate

    def check(self, case: str, layout: str, refusal: str | None) -> None:
        """Assert that a case is refused, by one rank at least, or equals one process."""
        if refusal is None:
            self.cases.check(case, layout, None)
            return
        with pytest.raises((RankError, AssertionError), match=refusal):
            self.cases.check(case, layout, None)
