"""The notebooks of examples/ run from top to bottom, and say what they promise."""

import os
import sys
from pathlib import Path

import pytest

nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel: the extra `test`")
nbformat = pytest.importorskip("nbformat")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SAID = {
    "plan_in_a_notebook": [
        r'"blocks.*.up": "colwise_alone"',
        "tensor_parallel_size=7",
        "loss ",
        "2 devices need 2 processes",
    ],
    "mesh_from_a_notebook": ["100% of the tokens get their tag"],
}

pytestmark = pytest.mark.contract


def test_every_notebook_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.ipynb")} == set(SAID)


@pytest.mark.slow
@pytest.mark.parametrize("name", SAID)
def test_notebook_runs_and_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = [str(Path(sys.executable).parent), os.environ["PATH"]]
    monkeypatch.setenv("PATH", os.pathsep.join(path))  # as in an environment that is activated
    book = nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in book.cells), "stored without outputs"
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(book, timeout=150, resources=place).execute()
    printed = [
        out.text
        for cell in book.cells
        for out in cell.get("outputs", ())
        if out.output_type == "stream"
    ]
    assert [text for text in SAID[name] if text not in "".join(printed)] == []
