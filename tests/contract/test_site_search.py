"""Searches on the site find the page that answers them, as the theme's own worker ranks them."""

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
SEARCHES = Path(__file__).parent / "searches.yaml"

pytestmark = [
    pytest.mark.contract,
    pytest.mark.skipif(find_spec("zensical") is None, reason="needs the extra docs"),
    pytest.mark.skipif(shutil.which("node") is None, reason="needs node"),
]


def build_site(folder: Path) -> Path:
    """Build the whole site below `folder`, as `make docs` does."""
    config = yaml.unsafe_load((ROOT / "mkdocs.yml").read_text())
    config |= {"docs_dir": "docs", "site_dir": "site"}
    for plugin in config["plugins"]:
        if "mkdocstrings" in plugin:
            plugin["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT)]
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    make_pages = [
        sys.executable,
        str(ROOT / "docs/site/make_pages.py"),
        "--out",
        str(folder / "docs"),
    ]
    for command in (make_pages, [str(Path(sys.executable).parent / "zensical"), "build"]):
        subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=True, timeout=300
        )
    return folder / "site"


def test_95_of_100_searches_find_the_right_page_first(tmp_path: Path) -> None:
    wanted = yaml.safe_load(SEARCHES.read_text())
    site = build_site(tmp_path)
    command = ["node", str(ROOT / "docs/site/search.js"), str(site)]
    answer = subprocess.run(
        command, input=json.dumps([*wanted]), capture_output=True, text=True, check=True
    )
    found = json.loads(answer.stdout)
    first = {q: (found[q] or ["nothing"])[0].partition("#")[0].rstrip("/") for q in wanted}
    missed = {q: first[q] for q, page in wanted.items() if (first[q] or "index") != page}
    assert len(wanted) >= 60
    assert len(missed) <= 0.05 * len(wanted), missed
