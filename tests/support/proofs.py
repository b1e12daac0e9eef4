"""Names of tests that prove a line of a table: ``file::function``, or ``file::case``."""

import ast
from functools import cache
from pathlib import Path

__all__ = ["REASONS", "assert_proofs_exist"]

VALUE = "gives a value, a size or a name that exists, as every other run does"
ONE = "leaves the axis, the option or the callback out, as every other run does"
FILE = "gives a file or a folder that is whole"
OUTSIDE = "changes the machine: a package, a compiler, a right, a host, a process"
REASONS = {VALUE, ONE, FILE, OUTSIDE}
"""What stands in the place of tests."""

_TESTS = Path(__file__).resolve().parents[1]


def assert_proofs_exist(proofs: str) -> None:
    """Assert that each of some names, separated by blanks, is a test or a case.

    Args:
        proofs: A name without a path is of a file of tests/distributed/user_code.
    """
    for proof in proofs.split():
        file, name = proof.split("::")
        path = _TESTS / (file if "/" in file else f"distributed/user_code/test_{file}.py")
        assert path.is_file(), proof
        assert name in _names_in(path), proof


@cache
def _names_in(path: Path) -> set[str]:
    """Give the functions of a test file, and the keys of its tables."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Dict):
            found |= {str(k.value) for k in node.keys if isinstance(k, ast.Constant)}
    return found
