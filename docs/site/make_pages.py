"""Writes the pages of the site to build/docs: the guides, the reference, and what they link to.

The guides stay readable in the repository; here, links to code become links to pages with that
code. A plain script and no plugin of one generator, so that mkdocs.yml suits every one that
reads it.
"""

import argparse
import json
import shutil
from pathlib import Path

from calculator_data import data
from reference import pages
from source_links import Linker, PROJECT, ROOT

DOCS = ROOT / "docs"
KEPT = ("pictures", "reports", "screenshots")
"""Folders of docs/ that are copied whole."""
SCRIPTS = {"which_layout.md": ("planner_data.js", "layouts.js", "calculator.js")}
"""Page -> what it loads from assets/."""


def make(out: Path) -> None:
    """Write every page.

    Args:
        out: Folder; what is in it is removed first.
    """
    shutil.rmtree(out, ignore_errors=True)
    for name in KEPT:
        shutil.copytree(DOCS / name, out / name)
    shutil.copytree(DOCS / "site" / "assets", out / "assets")
    (out / "assets" / "planner_data.js").write_text(f"const PLANNER = {json.dumps(data())};\n")
    linker = Linker(out)
    for file in sorted(DOCS.glob("*.md")):
        page = "index.md" if file.name == "README.md" else file.name
        text = linker.rewrite(file.read_text(), f"docs/{file.name}", page)
        loads = [f'<script src="assets/{name}"></script>' for name in SCRIPTS.get(page, ())]
        (out / page).write_text("\n".join([text.replace("](README.md", "](index.md"), *loads]))
    for page, text in pages():
        (out / page).parent.mkdir(exist_ok=True)
        (out / page).write_text(text)
    for place, page in PROJECT.items():
        (out / page).parent.mkdir(exist_ok=True)
        (out / page).write_text(linker.rewrite((ROOT / place).read_text(), place, page))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs")
    make(parser.parse_args().out)
