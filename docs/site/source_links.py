"""Pages for the files that the guides link to in the repository: no link leaves the site."""

import ast
import json
import os
import re
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(?<=\]\()([^)\s:]+)(?=\))")
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
PROJECT = {
    "examples/README.md": "project/gallery.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
}
"""Page outside of docs/ -> its path in the site."""
HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"
"""Begins a page that the search does not look at."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml", ".json": "json"}


class Linker:
    """Rewrites links of Markdown, and writes a page for every file that they lead to.

    Args:
        out: Folder of the site's pages.
    """

    def __init__(self, out: Path) -> None:
        self.out, self._done = out, set[PurePosixPath]()

    def rewrite(self, text: str, place: str, page: str) -> str:
        """Return `text` with links that leave `docs/` turned to pages of the site.

        Args:
            text: Markdown.
            place: Path of its file in the repository.
            page: Path of its page in the site.
        """
        parts = FENCE.split(text)
        link = lambda m: self._target(m[1], place, page)  # noqa: E731
        return "".join(p if p.startswith("```") else LINK.sub(link, p) for p in parts)

    def _target(self, target: str, place: str, page: str) -> str:
        path, mark, heading = target.partition("#")
        if not path:
            return target
        wanted = os.path.normpath(PurePosixPath(place).parent / path)
        kept = (self.out / os.path.relpath(wanted, "docs")).suffix not in ("", ".py")
        if wanted in PROJECT:
            found = PROJECT[wanted]
        elif wanted.startswith("docs/reports/"):
            found = os.path.relpath(wanted, "docs").replace(".json", ".html")
        elif wanted.startswith("docs/") and kept:
            found = os.path.relpath(wanted, "docs")
        else:
            found = self._source(PurePosixPath(wanted))
        return os.path.relpath(found, PurePosixPath(page).parent) + mark + heading

    def _source(self, path: PurePosixPath) -> str:
        """Write the page of a file or a folder; return its path in the site."""
        page = f"source/{path}{'' if path.suffix == '.md' else '.md'}"
        if path in self._done:
            return page
        self._done.add(path)
        file = ROOT / path
        if not file.exists():
            raise FileNotFoundError(f"a link leads to {path}, which does not exist")
        if path.suffix == ".md":
            text = self.rewrite(file.read_text(), str(path), page)
        else:
            body = listing(file) if file.is_dir() else block(file)
            text = f"# {path.name}\n\n`{path}`\n\n{body}\n"
        if path.suffix == ".ipynb":
            text = notebook(file)
        target = self.out / page
        target.parent.mkdir(parents=True, exist_ok=True)
        # Found by links, not by words: the search is for the guides and the reference.
        target.write_text(HIDDEN + text)
        return page


def listing(folder: Path) -> str:
    """Return the files of a folder, each with the first sentence of its docstring."""
    files = [f for f in sorted(folder.iterdir()) if f.suffix in (".py", ".yaml")]
    found = {f.name: summary(f) for f in files if f.name != "__init__.py"}
    return "\n".join(f"- `{name}`: {said}".removesuffix(": ") for name, said in found.items())


def summary(file: Path) -> str:
    """Return the first sentence of a module, or the first comment of another file."""
    text = file.read_text()
    if file.suffix == ".py":
        said = ast.get_docstring(ast.parse(text)) or ""
        return " ".join(said.partition("\n\n")[0].split())
    first = text.partition("\n")[0]
    return first.removeprefix("# ") if first.startswith("#") else ""


def notebook(file: Path) -> str:
    """Return the cells of a notebook as Markdown."""
    cells = json.loads(file.read_text())["cells"]
    sources = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "\n\n".join(s if kind == "markdown" else f"```python\n{s}\n```" for kind, s in sources)


def block(file: Path) -> str:
    """Return the text of a file as a block that no fence inside of it ends."""
    return f"~~~~~{LANGUAGES.get(file.suffix, 'text')}\n{file.read_text().rstrip()}\n~~~~~"
