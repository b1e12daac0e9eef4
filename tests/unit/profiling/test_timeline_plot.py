"""Laws of the drawn timeline: what is in the picture, and what is refused."""

import sys
from xml.etree import ElementTree

import pytest

from lightning_par.engine.pipeline.actions import parse_actions, TimedAction
from lightning_par.engine.pipeline.schedules import one_f_one_b
from lightning_par.engine.pipeline.simulator import simulate
from lightning_par.errors import ConfigurationError, ScheduleError
from lightning_par.profiling.timeline_plot import draw_timeline


def read_words(path):
    """The texts of an SVG, in the order in which they are drawn."""
    return [e.text for e in ElementTree.parse(path).iter() if e.tag.endswith("}text")]


def read_fills(path):
    """How many shapes have each fill color."""
    text = path.read_text()
    return {name: text.count(f"fill: {c}") for name, c in (("F", "#3b76af"), ("B", "#e08a2e"))}


def test_every_action_is_a_box_with_its_microbatch_in_a_color_of_its_kind(tmp_path):
    events = simulate(one_f_one_b(3, 5)).events
    path = draw_timeline(events, tmp_path / "a.svg", title="1F1B", unit="slots")
    words = read_words(path)
    assert [words.count(str(m)) for m in (1, 2, 3, 4)] == [6, 6, 6, 6]
    assert read_fills(path) == {"F": 15 + 1, "B": 15 + 1}  # + 1: the legend
    for word in ("stage 0", "stage 2", "forward", "backward", "idle", "time (slots)"):
        assert words.count(word) == 1
    assert "1F1B, bubble 28.6 %" in words


def test_measured_seconds_are_drawn_in_milliseconds_from_the_first_start(tmp_path):
    first, second = parse_actions("0F0 1F0")
    rows = [[TimedAction(first, 100.0, 100.5)], [TimedAction(second, 100.5, 101.0)]]
    words = read_words(draw_timeline(rows, tmp_path / "a.svg", title="measured"))
    assert {"0", "1000", "time (ms)", "measured, bubble 50.0 %"} <= set(words)


def test_labels_default_to_the_stages_that_a_rank_ran(tmp_path):
    rows = [[TimedAction(a, i, i + 1) for i, a in enumerate(parse_actions("0F0 3F0"))], []]
    words = read_words(draw_timeline(rows, tmp_path / "a.svg", title="t"))
    assert {"stages 0, 3", "rank 1"} <= set(words)
    words = read_words(draw_timeline(rows, tmp_path / "b.svg", title="t", labels=["x", "y"]))
    assert {"x", "y"} <= set(words)


def test_the_suffix_says_the_format_and_the_same_events_give_the_same_file(tmp_path):
    events = simulate(one_f_one_b(2, 40)).events
    png = draw_timeline(events, tmp_path / "a.png", title="t", unit="slots")
    assert png.read_bytes().startswith(b"\x89PNG")
    one, two = (draw_timeline(events, tmp_path / f"{n}.svg", title="t") for n in "ab")
    assert one.read_bytes() == two.read_bytes()


def test_numbers_that_do_not_fit_their_box_are_left_out(tmp_path):
    events = simulate(one_f_one_b(2, 300)).events
    words = read_words(draw_timeline(events, tmp_path / "a.svg", title="t", unit="slots"))
    assert "217" not in words


def test_an_unknown_suffix_is_refused_with_the_valid_ones(tmp_path):
    with pytest.raises(ConfigurationError, match=r"a\.gif'.*suffixes \.pdf, \.png, \.svg"):
        draw_timeline(simulate(one_f_one_b(2, 2)).events, tmp_path / "a.gif", title="t")


def test_nothing_to_draw_is_refused(tmp_path):
    with pytest.raises(ScheduleError, match="nothing to draw"):
        draw_timeline([[], []], tmp_path / "a.svg", title="t")


def test_labels_that_do_not_fit_the_ranks_are_refused(tmp_path):
    with pytest.raises(ScheduleError, match="has 1 entries, but the timeline has 2 ranks"):
        draw_timeline(simulate(one_f_one_b(2, 2)).events, tmp_path / "a.svg", title="t", labels="a")


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match=r'pip install "lightning-par\[plot\]"'):
        draw_timeline(simulate(one_f_one_b(2, 2)).events, tmp_path / "a.svg", title="t")
