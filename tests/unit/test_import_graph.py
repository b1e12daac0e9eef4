"""The direction of imports: no circle, no arrow back up, small rooms, an engine without Lightning.

An arrow is any import that runs, also inside a function; those under TYPE_CHECKING do not run. The
package that an imported module lies in is imported too, but is no arrow: every room would point at
the root. Each check is also run on a sample that breaks it.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_par"
MOST_ENTRIES, MOST_ROOMS = 20, 24

ORDER = """
    version  errors  units
    upstream
    plan.tensor_styles  plan.block_partition  dtensor  sizes
    plan.parallel_plan  mesh  checkpoint
    plan.stage_partition
    plan.resolved_plan
    plan
    engine
    engine.option_fields  engine.annotations  engine.clock  engine.activity  engine.rng
    engine.collectives
    engine.master_weights  engine.wrapping  engine.tensor_tree
    engine.activations  engine.batch  engine.pipeline  engine.init.construction_tape
    engine.init.deferred_init
    engine.tensor  engine.context
    engine.experts
    engine.init  engine.data
    engine.offload
    engine.memory  engine.grad_scaler  optimizers
    observe
    inference
    profiling  huggingface  planner
    inference.lookup
    planner.step_recorder
    planner.block_trace
    profiling.calibration
    strategies  models
    callbacks  verification  demo
    registration
    lightning_par
    commands
    cli
"""
"""Rooms, each with the modules that no longer name claims; a line imports only lines above it."""

KNOW_LIGHTNING = ("strategies", "callbacks", "models", "commands", "verification", "cli", "demo")
KNOW_LIGHTNING += (
    "observe.isolate",
    "observe.outside",
    "upstream.lightning",
)

Graph = Mapping[str, set[str]]


def running(tree: ast.AST) -> Iterator[ast.AST]:
    """Give all nodes but those that only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for other in node.orelse:
                yield other
                yield from running(other)
        else:
            yield node
            yield from running(node)


def imported(text: str) -> Iterator[str]:
    """Give what may be modules: ``from a import b`` gives ``a.b``, of which b may be a function."""
    for node in running(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (a.value for a in node.args if isinstance(a, ast.Constant))


def read_graph(package: Path) -> dict[str, set[str]]:
    """Map every module of a package to the modules of the package that it imports."""
    files = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package.parent).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    graph: dict[str, set[str]] = {}
    for module, file in files.items():
        names = [n if n in files else n.rpartition(".")[0] for n in imported(file.read_text())]
        graph[module] = {n for n in names if n in files} - {module}
    return graph


def circle(graph: Graph) -> list[str]:
    """Return the modules of one circle of imports, if there is one."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def levels(order: str) -> dict[str, int]:
    lines = order.strip().splitlines()
    return {room: level for level, line in enumerate(lines) for room in line.split()}


def room_of(module: str, rooms: Mapping[str, int]) -> str | None:
    """Return the longest name of a room that a module lies in."""
    name = module.partition(".")[2] or module
    while name and name not in rooms:
        name = name.rpartition(".")[0]
    return name or None


def arrows_up(graph: Graph, order: str) -> list[str]:
    """Return every import of a room that is not above the one that imports it."""
    rooms = levels(order)
    places = {module: room_of(module, rooms) for module in graph}
    problems = [f"{m} is in no room of ORDER" for m, room in places.items() if room is None]
    for module, targets in graph.items():
        for target in sorted(targets):
            here, there = places[module], places[target]
            if here and there and here != there and rooms[there] >= rooms[here]:
                problems.append(f"{module} ({here}) imports {target} ({there})")
    return problems


def crowded(package: Path) -> list[str]:
    """Return every package with too many modules and packages directly in it."""
    problems = []
    for init in sorted(package.rglob("__init__.py")):
        modules = [p for p in init.parent.glob("*.py") if p != init]
        packages = [p for p in init.parent.iterdir() if (p / "__init__.py").exists()]
        count = len(modules) + len(packages)
        most = MOST_ROOMS if init.parent == package else MOST_ENTRIES  # the root holds every room
        if count > most:
            problems.append(f"{init.parent}: {count} modules and packages, at most {most}")
    return problems


FRESH_PROCESS = """
import importlib, importlib.abc, sys

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("lightning", "pytorch_lightning"):
            raise ImportError(f"{name} must not be imported here")

sys.meta_path.insert(0, Refuse())
for name in sys.argv[1:]:
    importlib.import_module(name)
found = {name.partition(".")[0] for name in sys.modules} & {"lightning", "pytorch_lightning"}
sys.exit(f"imported: {sorted(found)}" if found else 0)
"""


def import_without_lightning(names: list[str], folder: Path = ROOT) -> str:
    """Import modules in one fresh process that refuses Lightning; return what went wrong."""
    command = [sys.executable, "-c", FRESH_PROCESS, *names]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stderr


def may_know_lightning(module: str) -> bool:
    name = module.partition(".")[2]
    return any(name == room or name.startswith(f"{room}.") for room in KNOW_LIGHTNING)


def plant(folder: Path, **files: str) -> Path:
    """Write a package ``sample``; two underscores in a name stand for a folder."""
    package = folder / "sample"
    for name, text in files.items():
        file = package.joinpath(*name.split("__")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        (file.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    return package


def test_imports_have_no_circle() -> None:
    assert circle(read_graph(PACKAGE)) == []


def test_imports_point_one_way() -> None:
    problems = arrows_up(read_graph(PACKAGE), ORDER)
    assert not problems, "\n".join(problems)


def test_no_package_is_crowded() -> None:
    assert not crowded(PACKAGE)


def test_the_package_without_its_upper_rooms_imports_no_lightning() -> None:
    names = [m for m in read_graph(PACKAGE) if not may_know_lightning(m)]
    assert {
        "lightning_par",
        "lightning_par.plan.parallel_plan",
        "lightning_par.engine.data.fsdp",
    } < {*names}
    assert import_without_lightning(sorted(names)) == ""


def test_a_planted_circle_is_found(tmp_path: Path) -> None:
    late = "def f():\n    from sample import a\n"
    assert circle(read_graph(plant(tmp_path, a="import sample.b\n", b=late)))
    typed = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sample import a\n"
    assert circle(read_graph(plant(tmp_path, a="import sample.b\n", b=typed))) == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("from sample.high import x\n", "sample.low (low) imports sample.high (high)"),
        ("import sample.high.inner as x\n", "sample.low (low) imports sample.high.inner (high)"),
        ("def f():\n    import sample.high\n", "sample.low (low) imports sample.high (high)"),
        ("import_module('sample.high')\n", "sample.low (low) imports sample.high (high)"),
        ("from sample import beside\n", "sample.low (low) imports sample.beside (beside)"),
        ("import sample.lowest\n", None),
    ],
)
def test_a_planted_arrow_up_is_found(tmp_path: Path, text: str, problem: str | None) -> None:
    package = plant(tmp_path, low=text, beside="", lowest="", high__inner="x = 1\n")
    order = "lowest\n low beside\n high\n sample\n"
    assert arrows_up(read_graph(package), order) == ([problem] if problem else [])


def test_a_module_without_a_room_is_found(tmp_path: Path) -> None:
    graph = read_graph(plant(tmp_path, low="", new=""))
    assert arrows_up(graph, "low\n sample\n") == ["sample.new is in no room of ORDER"]


def test_a_crowded_package_is_found(tmp_path: Path) -> None:
    package = plant(tmp_path, **{f"room__m{i}": "" for i in range(MOST_ENTRIES)})
    assert crowded(package) == []
    plant(tmp_path, room__more__m="")
    assert crowded(package) == [f"{package / 'room'}: 21 modules and packages, at most 20"]


def test_planted_imports_of_lightning_are_found(tmp_path: Path) -> None:
    plant(tmp_path, clean="import json\n", hidden="__import__('lightning')\n")
    assert import_without_lightning(["sample.clean"], tmp_path) == ""
    planted = import_without_lightning(["sample.hidden"], tmp_path)
    assert "lightning must not be imported here" in planted
