"""Writes the pages of the site to build/docs: the guides, the reference, and what they link to.

The guides stay readable in the repository; here, links to code become links to pages with that
code. A plain script and no plugin of one generator, so that mkdocs.yml suits every one that
reads it.
"""

import argparse
import json
import re
import shutil
from pathlib import Path

import answers
import yaml
from calculator_data import data
from reference import pages
from source_links import FENCE, HIDDEN, Linker, PROJECT, ROOT

from lightning_par.profiling.html_report import render

DOCS = ROOT / "docs"
KEPT = ("pictures", "screenshots")
"""Folders of docs/ that are copied whole."""
MEASURED = re.compile(r"<!-- measured -->\n(.*?)<!-- /measured -->", re.DOTALL)
"""The table of the README, which the home page of the site shows, too."""
SECTION = re.compile(r"^(?=## )", re.MULTILINE)
SHOT = re.compile(r"!\[([^]]*)\]\(screenshots/(\w+)\.png\)")
UNSEARCHED = ("all_pages.md", "faq.md", "project/changelog.md", "project/contributing.md")
"""What repeats in short what other pages say: the search leads to those."""
SCRIPTS = {"which_layout.md": ("planner_data.js", "layouts.js", "calculator.js")}
"""Page -> what it loads from assets/."""


def make(out: Path) -> None:
    """Write every page; the reports of the profilers, whose data is kept, are rendered.

    Args:
        out: Folder; what is in it is removed first.
    """
    shutil.rmtree(out, ignore_errors=True)
    for name in KEPT:
        shutil.copytree(DOCS / name, out / name)
    shutil.copytree(DOCS / "site" / "assets", out / "assets")
    (out / "reports").mkdir()
    for data_file in sorted((DOCS / "reports").glob("*.json")):
        shown = render(json.loads(data_file.read_text()))
        (out / "reports" / f"{data_file.stem}.html").write_text(shown)
    planner = data()
    (out / "assets" / "planner_data.js").write_text(f"const PLANNER = {json.dumps(planner)};\n")
    words = yaml.safe_load((DOCS / "site" / "search_words.yaml").read_text())
    measured = MEASURED.search((ROOT / "README.md").read_text())
    assert measured is not None
    linker = Linker(out)
    for file in sorted(DOCS.glob("*.md")):
        page = "index.md" if file.name == "README.md" else file.name
        text = linker.rewrite(SHOT.sub(embed, file.read_text()), f"docs/{file.name}", page)
        if page == "index.md":
            table = linker.rewrite(measured[1].strip(), "README.md", page)
            text = text.replace("<!-- measured -->", table)
        text = text.replace("<!-- answers -->", answers.table(planner["answers"]))
        text = with_words(text, words.get(page, ""))
        loads = [f'<script src="assets/{name}"></script>' for name in SCRIPTS.get(page, ())]
        text = HIDDEN * (page in UNSEARCHED) + text
        (out / page).write_text("\n".join([text.replace("](README.md", "](index.md"), *loads]))
    for page, text in pages():
        (out / page).parent.mkdir(exist_ok=True)
        (out / page).write_text(text)
    for place, page in PROJECT.items():
        (out / page).parent.mkdir(exist_ok=True)
        text = linker.rewrite((ROOT / place).read_text(), place, page)
        (out / page).write_text(HIDDEN * (page in UNSEARCHED) + text)


def with_words(text: str, words: str) -> str:
    """Return a page with words for the search, hidden at the end of its introduction."""
    hidden = f"<p hidden>{words}</p>\n\n" if words else ""
    parts = FENCE.split(text)  # a fence may hold lines that look like headings
    for at, part in enumerate(parts):
        if not part.startswith("```") and SECTION.search(part):
            parts[at] = SECTION.sub(hidden.replace("\\", r"\\"), part, count=1)
            return "".join(parts)
    return f"{text}\n\n{hidden}"


def embed(shot: re.Match[str]) -> str:
    """Return a report in place of its picture, if there is one."""
    said, name = shot.groups()
    if not (DOCS / "reports" / f"{name}.json").exists():
        return shot[0]
    return f'<iframe class="report" src="reports/{name}.html" title="{said}"></iframe>'


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs")
    make(parser.parse_args().out)
