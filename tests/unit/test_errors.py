"""Every error has a code of the catalogue, and the catalogue holds what the errors say."""

import ast
import copy
import pickle
import re
import sys
from functools import cache
from pathlib import Path

import pytest

from lightning_par import errors
from lightning_par.cli import main
from lightning_par.errors import ConfigurationError, LightningParError, MeshError, raise_problems
from lightning_par.errors.catalogue import entries, families

PACKAGE = Path(errors.__file__).parents[1]
ROOT = Path(__file__).parents[2]
KEPT = Path(__file__).with_name("error_codes.txt")
CODE = re.compile(r"LP\d{3}")
OURS = {n for n in errors.__all__ if n.endswith("Error")} | {"PickledValueError"}
LEAST = 12
"""Characters of a text besides its values, by which it is told from another one."""


def name_of(node: ast.expr | None) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def lacks_code(node: ast.AST) -> bool:
    """Whether a node raises or makes an error of ours without a code."""
    if isinstance(node, ast.Raise):
        return name_of(node.exc) in OURS
    position = {"raise_problems": 1, **dict.fromkeys(OURS, 0)}
    if not isinstance(node, ast.Call) or name_of(node.func) not in position:
        return False
    given = [ast.unparse(value) for value in node.args[position[name_of(node.func)] :][:1]]
    return not any(re.fullmatch(r"\w+\.code|codes?|'LP\d{3}'", text) for text in given)


def pattern_of(node: ast.AST) -> tuple[str, str] | None:
    """Return a text as a pattern in which a value is any text, and its longest fixed part.

    Line breaks are blanks, as in the catalogue.
    """
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    texts = [p.value if isinstance(p, ast.Constant) else None for p in parts]
    texts = [re.sub(r"\s+", " ", t) if type(t) is str else t for t in texts]
    fixed = [t for t in texts if type(t) is str]
    if sum(map(len, fixed)) < LEAST:
        return None
    pattern = (".*" if t is None else re.escape(str(t)) for t in texts)
    return "".join(pattern), max(fixed, key=len)


@cache
def modules() -> dict[str, tuple[list[int], set[str], set[tuple[str, str]]]]:
    """Give a module's lines without a code, its codes, and its texts."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        if path.parent.name == "errors":
            continue
        nodes = [*ast.walk(ast.parse(path.read_text()))]
        lines = [node.lineno for node in nodes if lacks_code(node)]
        values = {node.value for node in nodes if isinstance(node, ast.Constant)}
        codes = {v for v in values if isinstance(v, str) and CODE.fullmatch(v)}
        texts = {t for t in map(pattern_of, nodes) if t is not None}
        found[str(path.relative_to(PACKAGE))] = lines, codes, texts
    return found


def test_every_error_has_a_code_of_the_catalogue_and_every_code_is_used() -> None:
    problems = [f"{at}:{line}" for at, (lines, *_) in modules().items() for line in lines]
    assert not problems, "\n".join(problems)
    used = set().union(*(codes for _, codes, _ in modules().values()))
    assert used == {code for code, entry in entries().items() if not entry.retired}


PLANTED = {
    'raise PlanError("the plan is wrong")': 1,
    "raise PlanError": 1,
    'raise PlanError(f"{x}", "LP203")': 1,
    'raise_problems(PlanError, ["a"])': 1,
    'raise PlanError("LP203", "the plan is wrong")': 0,
    "raise PlanError(error.code, error.message)": 0,
    'raise_problems(PlanError, "LP203", ["a"])': 0,
    'raise ValueError("not ours")': 0,
}


def test_an_error_without_a_code_is_found() -> None:
    for text, count in PLANTED.items():
        assert sum(map(lacks_code, ast.walk(ast.parse(text)))) == count, text


def test_every_example_is_what_a_module_with_that_code_says() -> None:
    for code, entry in entries().items():
        # Also of modules without codes, which make texts for others.
        texts = set().union(*(t for _, c, t in modules().values() if code in c or not c))
        near = [pattern for pattern, part in texts if part in entry.example]
        assert entry.retired or any(re.match(p, entry.example) for p in near), code


def test_entries_are_whole_and_codes_keep_their_meaning() -> None:
    found = {}
    for code, entry in entries().items():
        assert CODE.fullmatch(code)
        assert code[:3] in families(), code
        assert not entry.title.endswith("."), code
        for text in (entry.cause, entry.cure):
            assert text.endswith("."), code
        assert len(entry.example) >= LEAST, code
        found[code] = entry.title
    assert len({*found.values()}) == len(found)
    # A code is for ever: a line here is never changed or taken out, only added.
    kept = dict(line.split(" ", 1) for line in KEPT.read_text().splitlines())
    assert found == kept


@pytest.mark.parametrize("name", sorted(OURS & {*errors.__all__}))
def test_code_survives_a_copy_and_a_pickle_and_ends_the_message(name: str) -> None:
    kind = getattr(errors, name)
    error = kind("LP203", "what is wrong")
    for one in (error, pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(one) is kind
        assert (one.code, one.message) == ("LP203", "what is wrong")
        assert str(one) == "what is wrong [lightning-par explain LP203]"


def test_message_ends_with_a_link_where_the_metadata_name_a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "lightning_par-9.dist-info"
    info.mkdir()
    urls = "Project-URL: Source, https://a.test\nProject-URL: Documentation, https://b.test/stable/"
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: lightning_par\nVersion: 9\n{urls}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    errors._site.cache_clear()
    try:
        told = str(ConfigurationError("LP607 LP913", "wrong"))
    finally:
        errors._site.cache_clear()
    assert told == "wrong [LP607 LP913: https://b.test/stable/reference/error_codes/#lp607]"
    assert "reference/error_codes.md" in (ROOT / "mkdocs.yml").read_text()


def test_problems_of_several_causes_name_every_code_once() -> None:
    problems = [("LP607", "a"), "b", "c"]
    with pytest.raises(ConfigurationError) as caught:
        raise_problems(ConfigurationError, "LP913", problems)
    assert str(caught.value) == (
        "3 problems:\n  - a\n  - b\n  - c [lightning-par explain LP607 LP913]"
    )
    with pytest.raises(MeshError, match=r"^a \[lightning-par explain LP607\]$"):
        raise_problems(MeshError, "LP913", problems[:1])
    raise_problems(LightningParError, "LP913", [])


def test_only_the_command_reads_the_catalogue() -> None:
    texts = {p: p.read_text() for p in PACKAGE.rglob("*.py") if p.parent.name != "errors"}
    readers = [path.stem for path, text in texts.items() if "errors.catalogue" in text]
    assert readers == ["explain"]  # importing the package does not pay for it


def explain(monkeypatch, capsys, *codes: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["lightning-par", "explain", *codes])
    with pytest.raises(SystemExit) as stop:
        main()
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


def test_explain_prints_cause_example_and_cure(monkeypatch, capsys) -> None:
    status, out, _ = explain(monkeypatch, capsys, "LP203", "lp501")
    assert status == 0
    words = " ".join(out.split())
    for code in ("LP203", "LP501"):
        entry = entries()[code]
        for text in (f"{code}: {entry.title}", entry.cause, entry.example, entry.cure):
            assert " ".join(text.split()) in words
    assert max(map(len, out.splitlines())) <= 100
    _, out, _ = explain(monkeypatch, capsys)
    assert [line.split()[0] for line in out.splitlines() if CODE.match(line)] == [*entries()]
    status, _, err = explain(monkeypatch, capsys, "LP999")
    assert status == 1
    assert "LP999 is no error code of lightning_par; did you mean" in err
