"""What the guides say runs, parses, exists and is drawn by the script that they name."""

import ast
import contextlib
import inspect
import io
import logging
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from importlib import import_module
from pathlib import Path
from typing import Any

import matplotlib
import pytest

from lightning_par.cli import main
from lightning_par.plan.tensor_styles import TENSOR_STYLES
from lightning_par.sizes import ParallelSizes
from lightning_par.verification.processes import run_rank
from tests.support.cli_scripts import command, run_command, run_script
from tests.support.ranks.api import run_ranks

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = [README, *sorted(DOCS.glob("*.md"))]
EVERY_PAGE = sorted([*ROOT.glob("*.md"), *ROOT.glob("[!.]*/*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"\b(?:docs|tests|configs|examples|benchmarks)/[\w/]+\.(?:py|yaml|md)\b")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAME = re.compile(r"(\w+)=")
DEVICES = re.compile(r"devices=(\d+)")

SHORTER = {"halve_a_bubble.md": ("max_steps=12", "max_steps=2")}
"""What a page trains only to have steady times to show; what its blocks assert, a step tells."""

pytestmark = [
    pytest.mark.contract,
    # Lightning calls a method that jsonargparse has renamed.
    pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning"),
]


def blocks(language: str) -> list[Any]:
    """Give every block of a language, named by its page and its line."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            if match[1] == language:
                line = text.count("\n", 0, match.start()) + 1
                found.append(pytest.param(match[2], id=f"{page.relative_to(ROOT)}:{line}"))
    return found


def save_named_blocks(page: Path, folder: Path) -> None:
    """Save the blocks whose first line names a file, which later blocks of the page import."""
    for match in FENCE.finditer(page.read_text()):
        named = re.match(r"# (\w+\.py)\n", match[2])
        if match[1] == "python" and named:
            (folder / named[1]).write_text(shortened(page, match[2]))


def shortened(page: Path, source: str) -> str:
    """The same with fewer steps."""
    long, short = SHORTER.get(page.name, ("", ""))
    assert long in source
    return source.replace(long, short) if long else source


def run_block(rank: int, world: int, source: str, folder: str) -> str:
    """Run a block as a script in `folder`; return what it printed and logged."""
    sys.path.insert(0, folder)  # as Python does; the next job begins without it
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        handler = logging.StreamHandler(printed)
        for logger in loggers:
            logger.addHandler(handler)
        exec(compile(source, "block", "exec"), {"__name__": "__main__"})
    for logger in loggers:
        logger.removeHandler(handler)
    return printed.getvalue()


def printed_after(page: Path, source: str) -> list[str]:
    """Give the lines of the block of text right after a block of Python: what it prints."""
    following = page.read_text().partition(f"```python\n{source}```\n")[2]
    shown = re.match(r"(?:(?!```)[^\n]*\n){0,3}```text\n(.*?\n)```\n", following, re.DOTALL)
    return shown[1].splitlines() if shown else []


@pytest.mark.parametrize("source", blocks("python"))
def test_python_block_runs(source: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    page, _, _ = request.node.callspec.id.rpartition(":")
    save_named_blocks(ROOT / page, tmp_path)
    devices = DEVICES.search(source)
    world = int(devices[1]) if devices else 1
    shown = printed_after(ROOT / page, source)
    if (ROOT / page).name in SHORTER and "max_steps" in source:
        source = shortened(ROOT / page, source)
    printed = "".join(run_ranks(run_block, world, source, str(tmp_path), timeout=120))
    assert [line for line in shown if line not in printed] == []
    for name in re.findall(r"\"(\w+\.png)\"", source):
        assert (tmp_path / name).stat().st_size


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_first_block_runs_on_the_devices_that_it_names(devices: int, tmp_path: Path) -> None:
    source = blocks("python")[0].values[0]
    fewer, count = DEVICES.subn(f"devices={devices}", source)
    assert count == 1
    run_ranks(run_block, devices, fewer, str(tmp_path), timeout=120)


@pytest.mark.parametrize("source", blocks("yaml"))
def test_yaml_block_parses(
    source: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page, _, _ = request.node.callspec.id.rpartition(":")
    save_named_blocks(ROOT / page, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "run.yaml").write_text(source)
    command = ["lightning-par", "fit", f"--config={tmp_path / 'run.yaml'}", "--print_config"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code, capsys.readouterr().err


def test_files_of_an_own_model_are_planned_verified_and_trained_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On ranks that are there already; `verify` in processes of its own is in test_verify.py."""
    page = DOCS / "own_yaml.md"
    save_named_blocks(page, tmp_path)
    files = [match for match in FENCE.finditer(page.read_text()) if match[1] == "yaml"]
    (tmp_path / "run.yaml").write_text(files[0][2])
    planned, proved, trained = (match[2] for match in [*FENCE.finditer(page.read_text())][-3:])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    status, said, _ = command(monkeypatch, capsys, "plan", "--config", "run.yaml")
    assert status == 0
    assert said.endswith(planned)
    monkeypatch.setattr(import_module("lightning_par.verification.verify"), "run_ranks", trace)
    status, said, _ = command(monkeypatch, capsys, "verify", "--config", "run.yaml")
    assert status == 0
    rounding = re.compile(r"\S+e-1\d")
    assert rounding.sub("", said).endswith(rounding.sub("", proved))
    words = ("fit", "--config", "run.yaml", "--trainer.enable_progress_bar=false")
    first = run_ranks(run_own, 4, tmp_path, *words, timeout=120)[0]
    assert trained.strip() in first


def trace(make: Any, sizes: ParallelSizes, *, timeout: float) -> list[Any]:
    """What processes of `verify` give."""
    return run_ranks(trace_rank, sizes.world_size, make, sizes, timeout=timeout)


def trace_rank(rank: int, world: int, make: Any, sizes: ParallelSizes) -> Any:
    return run_rank(make, sizes, rank)


def run_own(rank: int, world: int, folder: Path, *words: str) -> str:
    """Run ``lightning-par`` in `folder`; return what it wrote."""
    sys.path.insert(0, str(folder))
    with contextlib.redirect_stderr(io.StringIO()) as text:
        said = run_command(rank, world, folder, *words)
    return "\n".join([*said, text.getvalue()])


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_of_a_page_exist(page: Path) -> None:
    """Files, and headings after `#`; also scripts, tests and configs that are only named."""
    text = page.read_text()
    links = [t.partition("#") for t in LINK.findall(text) if "://" not in t]
    missing = [t for t, _, _ in links if t and not (page.parent / t).exists()]
    missing += [path for path in NAMED.findall(text) if not (ROOT / path).exists()]
    for target, mark, heading in links:
        if mark and heading not in headings(page.parent / target if target else page):
            missing.append(f"{target}#{heading}")
    assert not missing, f"{page}: {missing}"


def headings(page: Path) -> set[str]:
    """The names by which links find the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}


def test_index_names_every_page_of_the_guide() -> None:
    index = DOCS / "all_pages.md"
    named = [t for t in LINK.findall(index.read_text()) if re.fullmatch(r"\w+\.md", t)]
    assert sorted(named) == sorted({page.name for page in DOCS.glob("*.md")} - {index.name})


def test_home_page_shows_what_search_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = next(m[2] for m in FENCE.finditer((DOCS / "README.md").read_text()) if "$ " in m[2])
    words, said = re.split(r"(?<!\\)\n", shown.removeprefix("$ lightning-par "), maxsplit=1)
    monkeypatch.chdir(ROOT)
    status, printed, _ = command(monkeypatch, capsys, *words.replace("\\\n", " ").split())
    assert status == 0
    assert [line for line in said.splitlines() if line not in printed] == []


def test_readme_shows_a_plan_first_and_is_short() -> None:
    text = README.read_text()
    assert len(text.split()) <= 1100
    (first, *_) = (match for match in FENCE.finditer(text))
    calls = [n for n in ast.walk(ast.parse(first[2])) if isinstance(n, ast.Call)]
    plans = [n for n in calls if ast.unparse(n.func) == "ParallelPlan"]
    assert [plan.end_lineno - plan.lineno + 1 <= 12 for plan in plans] == [True]


def test_readme_shows_the_refusal_that_its_example_prints_without_a_line(tmp_path: Path) -> None:
    text = README.read_text()
    (first, *_) = (match for match in FENCE.finditer(text))
    (shown,) = (match[2] for match in FENCE.finditer(text) if match[1] == "text")
    fewer, count = re.subn(r"\n *\"blocks\.\*\.norm\": .*", "", first[2])
    assert count == 1
    (tmp_path / "train.py").write_text(fewer)
    ended = subprocess.run(
        [sys.executable, tmp_path / "train.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert ended.returncode == 1
    assert ended.stderr.splitlines()[-1] == " ".join(shown.split())


def test_pages_are_no_longer_than_their_limits() -> None:
    limits = dict.fromkeys(PAGES, 120) | {ROOT / "CONTRIBUTING.md": 120, README: 200}
    limits |= {ROOT / name / "README.md": 20 for name in ("strategies", "models", "callbacks")}
    lengths = {page: len(page.read_text().splitlines()) for page in limits}
    assert not {p: n for p, n in lengths.items() if n > limits[p]}


def shapes(picture: Path) -> list[str]:
    """The kinds of the elements of an SVG, in order."""
    return [element.tag for element in ET.parse(picture).iter() if "metadata" not in element.tag]


SCRIPTS = sorted((DOCS / "drawing").glob("draw*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_pictures_are_what_the_script_draws(script: Path, tmp_path: Path) -> None:
    """The same bytes where matplotlib is the one that drew them, else the same kinds of shapes."""
    if script.stem == "draw":  # it counts on a process group of its own
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        subprocess.run(
            [sys.executable, str(script), "--out", str(tmp_path)],
            env={**os.environ, "PYTHONPATH": path},
            check=True,
            timeout=150,
        )
    else:
        run_ranks(run_script, 1, script, ROOT, "--out", str(tmp_path), timeout=150, fresh=True)
    drawn = sorted(tmp_path.iterdir())
    assert drawn
    for picture in drawn:
        old = (DOCS / "pictures" / picture.name).read_bytes()
        assert len(old) < 300_000, picture.name
        if f"Matplotlib v{matplotlib.__version__},".encode() in old:
            assert old == picture.read_bytes(), f"{picture.name}: run docs/drawing/{script.name}"
        else:
            kept = DOCS / "pictures" / picture.name
            assert len(shapes(picture)) == len(shapes(kept)), picture.name


def test_every_tensor_style_is_on_the_page_of_plans() -> None:
    text = (DOCS / "plans.md").read_text()
    assert [style for style in TENSOR_STYLES if f"`{style}`" not in text] == []


def test_every_picture_is_drawn_by_a_script() -> None:
    """By its name, which the script gives to `save`."""
    code = "".join(script.read_text() for script in SCRIPTS)
    pictures = [path.stem for path in (DOCS / "pictures").iterdir()]
    assert not [name for name in pictures if f'"{name}' not in code]


def test_every_picture_is_shown_on_a_page() -> None:
    shown = {Path(t).name for page in PAGES for t in LINK.findall(page.read_text())}
    assert {p.name for p in (DOCS / "pictures").iterdir()} <= shown


def test_options_of_other_tools_are_called_here_what_the_page_says() -> None:
    """Every `name=` of a right column is an argument."""
    from lightning.pytorch import Trainer

    from lightning_par import ParallelPlan, ZeROOffloadStrategy
    from lightning_par.strategies import MeshStrategy

    owners = (MeshStrategy, ZeROOffloadStrategy, ParallelPlan, Trainer, Trainer.fit)
    known = {name for owner in owners for name in inspect.signature(owner).parameters}
    known |= {"sync_dist", "strategy"}  # of self.log, and of the Trainer's own argument
    rows = re.findall(
        r"^\|[^|]*\| ([^|]*) \|$", (DOCS / "coming_from.md").read_text(), re.MULTILINE
    )
    named = {n for row in rows for code in re.findall("`[^`]*`", row) for n in NAME.findall(code)}
    assert len(named) > 20
    assert named - known == set()


def test_presets_have_the_parameters_that_the_guide_gives() -> None:
    from lightning_par.models.gpt.config import GPTConfig, PRESETS

    text = (DOCS / "models.md").read_text()
    rows = re.findall(r"^\| `([\w.-]+)` .*\| ([\d,]+) \|$", text, re.MULTILINE)
    assert {name: int(count.replace(",", "")) for name, count in rows} == {
        name: GPTConfig.preset(name).num_parameters for name in PRESETS
    }


def test_auto_sizes_are_those_that_the_guide_gives() -> None:
    from lightning_par.sizes import fit_sizes

    rules = {"tensor_parallel": "tensor", "pipeline_1f1b": "pipeline"}
    rules |= {"sequence_ring": "context", "hybrid3d": "balanced", "zero_offload": "data"}
    text = (DOCS / "strategies.md").read_text()
    for name, rule in rules.items():
        row = re.search(rf"^\| `{name}` \| (1 device .*) \|$", text, re.MULTILINE)
        assert row is not None, name
        for count, said in zip((1, 2, 3, 4, 6, 8, 16), row[1].split(" | "), strict=True):
            sizes = fit_sizes(num_devices=count, devices_per_node=min(count, 8), auto=rule)
            assert str(sizes).replace("dp_shard", "dp") == said, (name, count)
