"""What a run found out by itself is logged once, in one line."""

from lightning_par.strategies import decisions as made
from lightning_par.strategies.decisions import Decisions


def test_decisions_are_logged_once_and_again_when_they_change(monkeypatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(made, "rank_zero_info", lambda text, *given: lines.append(text % given))
    found = Decisions()
    found.log()
    found.add("loss", "the mean over the samples", "found in the first step")
    found.add("order", "the loader's")
    found.log()
    found.log()
    found.add("loss", "the mean over 'y' != -100", "seen in cross_entropy")
    found.log()
    head = "Decided for this run: "
    assert lines == [
        head + "loss: the mean over the samples, found in the first step; order: the loader's.",
        head + "loss: the mean over 'y' != -100, seen in cross_entropy.",
    ]
    assert [decision.name for decision in found] == ["loss", "order"]
    assert str(found).endswith("order: the loader's")
