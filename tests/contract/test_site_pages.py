"""What `make docs` says of pages that look wrong in a browser."""

import runpy
from pathlib import Path

import pytest

from tests.support.browser import find_browser

ROOT = Path(__file__).resolve().parents[2]
WRONG = {
    "fine": ("<p>text</p>", None),
    "faint": ('<p style="color: #999">text</p>', "contrast 2.85 of p."),
    "wide": ('<p style="width: 2000px">text</p>', "wider than the window: 2008 of"),
    "blank": ('<img src="none.png" alt="a">', "no picture: "),
    "broken": ("<script>missing()</script>", "ReferenceError: missing is not defined"),
    "other": ('<body data-md-color-scheme="sepia">', "not in the scheme that the user prefers"),
}

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(find_browser() is None, reason="needs a Chromium"),
]


def test_check_finds_pages_that_look_wrong_in_both_views(tmp_path: Path) -> None:
    for name, (body, _) in WRONG.items():
        head = '<!DOCTYPE html><html lang="en"><link rel="icon" href="data:,"><title>t</title>'
        (tmp_path / f"{name}.html").write_text(head + body)
    check = runpy.run_path(str(ROOT / "docs" / "site" / "check_rendered.py"))
    found = list(check["problems"](tmp_path, find_browser(), tmp_path))
    for view in ("light, 1400 pixels: ", "dark, 390 pixels: "):
        for name, (_, said) in WRONG.items():
            lines = [one for one in found if one.startswith(f"{name}.html, {view}")]
            assert bool(lines) == (said is not None), lines
            assert said is None or any(said in one for one in lines), (name, lines)
    assert len(list(tmp_path.glob("*.png"))) == 2 * len(WRONG)
