"""The site: its navigation is the guide's, its reference is complete, and its checks can fail."""

import doctest
import inspect
import json
import re
import runpy
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning
import pytest
import yaml

import lightning_par
from lightning_par import __version__
from lightning_par.commands import COMMANDS
from lightning_par.errors import LightningParError
from lightning_par.strategies import MeshStrategy, SequenceRingStrategy, ZeROOffloadStrategy

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "docs" / "site"
KINDS = ("Get started", "Tutorials", "How-to guides", "Reference", "Explanation")


@cache
def script(name: str) -> dict[str, Any]:
    sys.path.insert(0, str(SITE))
    try:
        return runpy.run_path(str(SITE / f"{name}.py"))
    finally:
        sys.path.remove(str(SITE))


def leaves(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    values = nav.values() if isinstance(nav, dict) else nav
    return [page for value in values for page in leaves(value)]


def test_navigation_has_the_kinds_of_pages_as_the_index_sorts_them() -> None:
    nav = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    by_kind = {name: leaves(part) for one in nav for name, part in one.items()}
    assert tuple(by_kind) == ("Home", *KINDS)
    text = (ROOT / "docs" / "all_pages.md").read_text()
    for kind in KINDS:
        section = text.partition(f"\n## {kind}\n")[2].partition("\n## ")[0]
        linked = re.findall(r"\]\((\w+\.md)\)", section)
        assert linked == [p for p in by_kind[kind] if "/" not in p], kind
    made = {page for page, _ in script("reference")["pages"]()}
    assert made == {p for p in leaves(nav) if p.startswith("reference/")}


def test_reference_has_every_argument_command_and_public_name() -> None:
    pages = dict(script("reference")["pages"]())
    rows = set(re.findall(r"^\| <code>(\w+)</code>", pages["reference/arguments.md"], re.M))
    for kind in (MeshStrategy, SequenceRingStrategy, ZeROOffloadStrategy):
        parameters = inspect.signature(kind).parameters.values()
        assert {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} <= rows
    commands = pages["reference/commands.md"]
    assert re.findall(r"^## (\w+)$", commands, re.M) == sorted(COMMANDS)
    for name in COMMANDS:
        assert f"usage: lightning-par {name} " in commands
    for name, title in script("reference")["PARTS"].items():
        module = name if name == "lightning_par" else f"lightning_par.{name}"
        assert f"::: {module}." in pages[f"reference/{name}.md"], title


def test_guide_names_every_argument_with_its_default() -> None:
    text = (ROOT / "docs" / "strategies.md").read_text()
    said = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \| [^|]+ \|$", text, re.M))
    wanted = {
        p.name: p.default
        for p in inspect.signature(MeshStrategy).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.name != "save_distributed_checkpoint"
    }
    defaults = {name: repr(value).replace("'", '"') for name, value in wanted.items()}
    assert {n: said.get(n) for n in wanted} == defaults | {"timeout": "torch's default"}


def test_an_argument_without_a_meaning_is_not_passed_over() -> None:
    class Silent(MeshStrategy):
        """A strategy that does not say what its argument is."""

        def __init__(self, *, surprise: int = 3) -> None: ...

    with pytest.raises(LookupError, match="Silent does not say what surprise is"):
        list(script("reference")["argument_rows"](Silent))


def test_links_to_code_become_pages_with_that_code(tmp_path: Path) -> None:
    linker = script("source_links")["Linker"](tmp_path)
    text = "[a](../lightning_par/mesh.py) [b](pipeline.md#x) [c](../docs/drawing)\n"
    text += "[e](../examples/README.md)\n```\n[d](../no)\n```"
    found = linker.rewrite(text, "docs/one.md", "one.md")
    assert found == (
        "[a](source/lightning_par/mesh.py.md) [b](pipeline.md#x) [c](source/docs/drawing.md)\n"
        "[e](project/gallery.md)\n```\n[d](../no)\n```"
    )
    shown = (tmp_path / "source/lightning_par/mesh.py.md").read_text()
    assert (ROOT / "lightning_par" / "mesh.py").read_text().strip() in shown
    with pytest.raises(FileNotFoundError, match=r"lightning_par/none\.py, which does not exist"):
        linker.rewrite("[a](../lightning_par/none.py)", "docs/one.md", "one.md")


BROKEN = {
    '<a href="none/">': "none/ does not exist",
    '<a href="#none">': "#none has no such heading",
    '<a href="other.html#x">': "other.html#x has no such heading",
    '<img src="none.svg" alt="a">': "none.svg does not exist",
    '<img src="other.html">': "other.html has no alt text",
    "<h3></h3>": "a heading of level 3 follows one of level 1",
    "<h1></h1>": "2 headings of level 1",
    "<p>========</p><pre>========</pre>": "shows '========' as it is",
    '<script src="https://cdn.example/x.js"></script>': "loads https://cdn.example/x.js",
    '<p id="a"></p><p id="a"></p>': "two elements have the id 'a'",
}


def test_check_of_the_site_finds_what_is_missing_or_fetched(tmp_path: Path) -> None:
    problems = script("check_site")["problems"]
    (tmp_path / "other.html").write_text('<h1 id="y"></h1>')
    fine = (
        '<h1></h1><h2 id="x"></h2><a href="#x"><a href="other.html#y"><a href="https://a.example/">'
    )
    (tmp_path / "index.html").write_text(fine)
    assert list(problems(tmp_path)) == []
    for text, said in BROKEN.items():
        (tmp_path / "index.html").write_text("<h1></h1>" + text)
        assert list(problems(tmp_path)) == [f"index.html: {said}"]


def test_configuration_fetches_nothing_and_generated_pages_are_not_kept() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert config["theme"]["font"] is False
    assert config["docs_dir"].startswith("build/")
    ignored = subprocess.run(
        ["git", "check-ignore", config["docs_dir"], config["site_dir"]], cwd=ROOT, check=False
    )
    assert ignored.returncode in (0, 128)  # 128: not a repository


def test_citation_names_this_version_and_issue_forms_are_whole() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    forms = [f for f in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if f.stem != "config"]
    assert forms
    for file in forms:
        form = yaml.safe_load(file.read_text())
        assert form["name"]
        assert form["description"]
        asked = [one for one in form["body"] if one["type"] != "markdown"]
        assert len({one["id"] for one in asked}) == len(asked)
        assert all(one["attributes"]["label"] for one in asked)


def public_classes() -> list[type]:
    parts = [n for n in script("reference")["PARTS"] if n != "lightning_par"]
    modules = [import_module(f"lightning_par.{name}") for name in parts]
    found = [getattr(m, n) for m in (lightning_par, *modules) for n in m.__all__]
    return [value for value in dict.fromkeys(found) if inspect.isclass(value)]


def test_every_public_class_has_an_example_that_runs(tmp_path: Path, monkeypatch: Any) -> None:
    """But for errors, of which the base class has one, and the rows of a `VerifyReport`."""
    monkeypatch.chdir(tmp_path)
    silent = []
    for kind in public_classes():
        known = vars(sys.modules[kind.__module__]) | {"L": lightning}
        (test,) = doctest.DocTestFinder(recurse=False).find(kind, globs=known)
        found = doctest.DocTestRunner().run(test)
        assert found.failed == 0, kind
        if not found.attempted and not issubclass(kind, LightningParError):
            silent.append(kind.__name__)
    assert sorted(silent) == ["Difference", "StepRow"]


def test_versions_of_the_site_are_listed_newest_first(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    add = runpy.run_path(str(ROOT / "docs" / "site" / "add_version.py"))["add"]
    versions = tmp_path / "versions"
    for version in ("0.9.0", "0.10.0", "0.2.0", "0.10.0"):
        (tmp_path / "site" / "index.html").write_text(f"this is {version}")
        assert (add(tmp_path / "site", versions, version) / "index.html").read_text()
    listed = json.loads((versions / "versions.json").read_text())
    assert [each["version"] for each in listed] == ["0.10.0", "0.9.0", "0.2.0"]
    assert [each["aliases"] for each in listed] == [["latest"], [], []]
    assert "url=0.10.0/" in (versions / "index.html").read_text()
    assert (versions / "0.2.0" / "index.html").read_text() == "this is 0.2.0"
