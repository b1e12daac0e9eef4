"""The limits of the house, held by tests; each check is also run on a sample that breaks it."""

import ast
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "lightning_par"
MODULE_LINES, LONG_MODULE_LINES, FUNCTION_LINES = 500, 600, 50
REASON = re.compile(r"^Length: \S", re.MULTILINE)
WAIVER = re.compile(r"# house: \S.*$")
PRINTING = {"cli.py", "commands"}
KNOW_LIGHTNING = {
    "strategies",
    "verification",
    "callbacks",
    "models",
    "commands",
    "observe/isolate.py",
    "observe/outside.py",
    "cli.py",
    "demo.py",
    "upstream/lightning.py",
}
TEXT = {".cfg", ".ini", ".json", ".md", ".py", ".sh", ".svg", ".toml", ".txt", ".yaml", ".yml", ""}
# Written in pieces, so that this file does not break its own rule.
FOLDERS = "|".join(["work", "home", "root", "tmp/[a-z]"])
MACHINE_PATH = re.compile(rf"(?<![\w.}}~])/(?:{FOLDERS})(?=[/\w.-])(?!/user\b)")
PACKAGE_INDEX = re.compile("--" + "(?:extra-)?index-url|--find" + "-links")

Check = Callable[[Path, str], list[str]]


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def pure_modules(package: Path) -> list[Path]:
    """Give every module that is not listed as one that may know Lightning."""
    found = [(m, m.relative_to(package)) for m in sorted(package.rglob("*.py"))]
    return [m for m, at in found if not {at.parts[0], at.as_posix()} & KNOW_LIGHTNING]


def tree_files() -> list[Path]:
    """Give every text file that git tracks or would track; without git, every one there is."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        names = [ROOT / n for n in listed.stdout.split("\0") if n]
    except (OSError, subprocess.CalledProcessError):
        hidden = {".git", ".venv", "__pycache__"}
        made = {"build", "dist"}
        places = [(p, p.relative_to(ROOT).parts) for p in ROOT.rglob("*")]
        names = [p for p, parts in places if not hidden & {*parts} and parts[0] not in made]
    return sorted(p for p in names if p.is_file() and p.suffix in TEXT)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    assert node.end_lineno is not None
    lines = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node, clean=False) is not None:
        first = node.body[0]
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def signature_lines(node: ast.FunctionDef | ast.AsyncFunctionDef, text: str) -> list[str]:
    return text.splitlines()[node.lineno - 1 : node.body[0].lineno]


def check_module_length(path: Path, text: str) -> list[str]:
    """A module may be longer if its docstring has a line "Length: " with the reason."""
    lines = text.count("\n")
    reason = lines > MODULE_LINES and REASON.search(ast.get_docstring(ast.parse(text)) or "")
    most = LONG_MODULE_LINES if reason else MODULE_LINES
    return [f"{path}: {lines} lines, at most {most}"] if lines > most else []


def check_function_length(path: Path, text: str) -> list[str]:
    problems = []
    for node in functions(ast.parse(text)):
        lines = code_lines(node)
        waived = any(WAIVER.search(line) for line in signature_lines(node, text))
        if lines > FUNCTION_LINES and not waived:
            problems.append(
                f"{path}:{node.lineno}: {node.name} has {lines}, at most {FUNCTION_LINES}"
            )
    return problems


def check_no_lightning(path: Path, text: str) -> list[str]:
    problems = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        bad = [n for n in names if n.partition(".")[0] in ("lightning", "pytorch_lightning")]
        problems += [f"{path}: imports {name}" for name in bad]
    return problems


def sort_key(name: str) -> tuple[int, str]:
    """CONSTANTS, then Classes, then functions, as ruff sorts `__all__`."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2, name)


def check_exports(path: Path, text: str) -> list[str]:
    if path.name.startswith("_") or not text.strip():
        return []
    found = [
        ast.literal_eval(node.value)
        for node in ast.parse(text).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    if not found:
        return [f"{path}: has no __all__"]
    wanted = sorted(found[0], key=sort_key)
    return [] if list(found[0]) == wanted else [f"{path}: __all__ is not sorted: {wanted}"]


def check_no_print(path: Path, text: str) -> list[str]:
    if {*path.parts} & PRINTING:
        return []
    calls = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
    bad = [n for n in calls if isinstance(n.func, ast.Name) and n.func.id == "print"]
    return [f"{path}:{n.lineno}: print outside {sorted(PRINTING)}" for n in bad]


def check_no_machine(path: Path, text: str) -> list[str]:
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        if MACHINE_PATH.search(line) or PACKAGE_INDEX.search(line):
            problems.append(f"{path}:{number}: belongs to one machine: {line.strip()[:80]}")
    return problems


CODE_CHECKS: list[Check] = [
    check_module_length,
    check_function_length,
    check_exports,
    check_no_print,
]


@pytest.mark.parametrize("check", CODE_CHECKS, ids=lambda c: c.__name__)
def test_package_keeps_the_limit(check: Check) -> None:
    problems = [p for m in modules() for p in check(m.relative_to(ROOT), m.read_text())]
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("check", [check_module_length, check_function_length])
def test_tests_and_scripts_keep_the_limits(check: Check) -> None:
    scripts = [f for f in tree_files() if f.suffix == ".py" and PACKAGE not in f.parents]
    problems = [p for m in scripts for p in check(m.relative_to(ROOT), m.read_text())]
    assert not problems, "\n".join(problems)


def test_engine_never_imports_lightning() -> None:
    pure = pure_modules(PACKAGE)
    problems = [p for m in pure for p in check_no_lightning(m.relative_to(ROOT), m.read_text())]
    assert not problems, "\n".join(problems)


def test_no_file_names_one_machine() -> None:
    files = tree_files()
    problems = [p for f in files for p in check_no_machine(f.relative_to(ROOT), f.read_text())]
    assert not problems, "\n".join(problems)


EXCUSED = '"""Rows.\n\nLength: table"""\n'
LONG = "def f():\n" + "    x = 1\n" * FUNCTION_LINES
PLANTED: list[tuple[Check, str, int]] = [
    (check_module_length, "x = 1\n" * (MODULE_LINES + 1), 1),
    (check_module_length, "x = 1\n" * MODULE_LINES, 0),
    (check_module_length, EXCUSED + "x = 1\n" * (LONG_MODULE_LINES - 3), 0),
    (check_module_length, EXCUSED + "x = 1\n" * (LONG_MODULE_LINES - 2), 1),
    (check_module_length, EXCUSED.replace("table", "") + "x = 1\n" * MODULE_LINES, 1),
    (check_function_length, LONG, 1),
    (check_function_length, LONG.replace("():", "():  # house: a table reads best whole"), 0),
    (check_function_length, LONG.replace("():", "():  # house:"), 1),
    (check_function_length, 'def f():\n    """A."""\n' + "    x = 1\n" * (FUNCTION_LINES - 1), 0),
    (check_no_lightning, "def f():\n    import lightning.pytorch as pl\n", 1),
    (check_no_lightning, "from pytorch_lightning import Trainer\n", 1),
    (check_no_lightning, "import lightning_par.plan.parallel_plan\n", 0),
    (check_exports, "x = 1\n", 1),
    (check_exports, '__all__ = ["b", "a"]\n', 1),
    (check_exports, '__all__ = ["AXES", "Batch", "a"]\n', 0),
    (check_no_print, "def f():\n    print(1)\n", 1),
    (check_no_print, "def f():\n    self.print(1)\n", 0),
    (check_no_machine, "see /" + "home/ann/x.py\n", 1),
    (check_no_machine, 'open("/' + 'tmp/out")\n', 1),
    (check_no_machine, "pip install --" + "index-url x\n", 1),
    (check_no_machine, "/" + "home/user/data, ./work/x, docs/work/y, https://a.b/home/c\n", 0),
]


@pytest.mark.parametrize(("check", "text", "count"), PLANTED)
def test_each_check_can_fail(check: Check, text: str, count: int) -> None:
    assert len(check(Path("planted.py"), text)) == count
