"""Every code of the catalogue names the advice of its messages, and the tests that apply it."""

import ast
from pathlib import Path

import pytest

from lightning_par.errors.catalogue import entries
from tests.contract.advice_on_runs import RUNS
from tests.contract.advice_on_steps import STEPS
from tests.support.proofs import assert_proofs_exist, REASONS

USER_CODE = Path(__file__).resolve().parents[1] / "distributed" / "user_code"

pytestmark = pytest.mark.contract

PROOFS = STEPS | RUNS


def test_every_code_has_its_advice() -> None:
    assert list(PROOFS) == sorted(code for code, entry in entries().items() if not entry.retired)


@pytest.mark.parametrize("code", PROOFS)
def test_proofs_exist(code: str) -> None:
    assert PROOFS[code]
    for proofs in PROOFS[code].values():
        if proofs not in REASONS:
            assert_proofs_exist(proofs)


def test_every_case_with_a_cure_is_named() -> None:
    """A case that applies advice (tests/support/cures.py) proves the code that it names."""
    for path in USER_CODE.glob("test_cures*.py"):
        file = path.stem.removeprefix("test_")
        for node in ast.parse(path.read_text()).body:
            for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "CURES.add":
                    code = ast.literal_eval(mark.args[0])
                    proofs = " ".join(PROOFS[code].values()).split()
                    assert f"{file}::{node.name}" in proofs
