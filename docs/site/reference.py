"""The reference, from the code: public names, arguments, commands, and the codes of errors."""

import contextlib
import html
import inspect
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from types import UnionType
from typing import Any, get_args, get_origin, Literal, Union

import docstring_parser

from lightning_par import strategies
from lightning_par.cli import main
from lightning_par.commands import COMMANDS, find_parser
from lightning_par.errors.catalogue import entries, families

PARTS = {
    "lightning_par": "lightning_par",
    "strategies": "Strategies",
    "callbacks": "Callbacks",
    "models": "Models and data",
    "optimizers": "Optimizers",
    "huggingface": "Hugging Face",
    "verification": "Verification",
    "errors": "Errors",
}
"""Module of the package -> title of its page."""
CALLED_BY_OURS = {
    *("is_distributed", "set_world_ranks", "strategy_name", "change_options"),
    *("counter", "measure", "describe", "draw", "config_type", "model_type"),
}
"""Members of strategies, callbacks and modules that only Lightning or this package uses."""


def pages() -> Iterator[tuple[str, str]]:
    """Yield the path of every page of the reference with its Markdown."""
    for part, title in PARTS.items():
        name = part if part == "lightning_par" else f"lightning_par.{part}"
        yield f"reference/{part}.md", names_page(name, title)
    yield "reference/arguments.md", arguments_page()
    yield "reference/commands.md", commands_page()
    yield "reference/error_codes.md", error_codes_page()


def names_page(module: str, title: str) -> str:
    """Return a page with every public name of a module, each on the page of its own module once."""
    made = import_module(module)
    elsewhere = set(strategies.__all__) if module == "lightning_par" else set()
    elsewhere |= {"LightningParError", "verify"} if module == "lightning_par" else set()
    names = [n for n in made.__all__ if not n.startswith("_") and n not in elsewhere]
    docs = inspect.getdoc(made) or ""
    lines = [f"# {title}", docs, f"`from {module} import ...`"]
    if elsewhere:
        lines.append(
            "Also exported here: the [strategies](strategies.md), "
            "[`verify`](verification.md) and [`LightningParError`](errors.md)."
        )
    names.sort(key=lambda n: n != "MeshStrategy")  # the others refer to it
    return "\n\n".join([*lines, *(directive(module, name) for name in names)]) + "\n"


def directive(module: str, name: str) -> str:
    """Return what shows a public name with the members that its users set or call."""
    value, lines = getattr(import_module(module), name), [f"::: {module}.{name}"]
    if inspect.isclass(value):
        hidden = "|".join(sorted(hooks(value)))
        filters = ["!^_", *([f"!^({hidden})$"] if hidden else [])]
        lines += ["    options:", f"      filters: {json.dumps(filters)}"]
        shown = {base.__name__ for base in value.__bases__} & {*import_module(module).__all__}
        if shown and "__init__" not in vars(value):
            lines.append("      show_signature: false")  # that of its base
    return "\n".join(lines)


def hooks(kind: type) -> set[str]:
    """Return the members of a class that its users neither set nor call: those of the Lightning or
    torch class that it derives from, but for `forward`, and some of ours.
    """
    foreign = [base for base in kind.__mro__[1:] if not ours(base) and base is not object]
    if not foreign:
        return set()
    inherited = {n for n in vars(kind) if any(hasattr(base, n) for base in foreign)}
    found = inherited | (CALLED_BY_OURS & {*vars(kind)})
    return {n for n in found - {"forward"} if not n.startswith("_")}


def ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "lightning_par"


def arguments_page() -> str:
    """Return the page with the arguments of every strategy: names, types and defaults from the
    signature, meanings from the docstring.
    """
    lines = [
        "# Arguments of the strategies",
        "Every strategy takes those of `MeshStrategy`, by keyword. In YAML they are "
        "`trainer.strategy.init_args`.",
    ]
    for name in sorted(strategies.__all__, key=lambda n: n != "MeshStrategy"):
        rows = list(argument_rows(getattr(strategies, name)))
        if rows:
            head = ["| argument | type | default | meaning |", "|---|---|---|---|"]
            lines += [f"## {name}", "\n".join([*head, *rows])]
    return "\n\n".join(lines) + "\n"


def argument_rows(kind: type) -> Iterator[str]:
    """Yield a row for each argument of a class's own `__init__`.

    Raises:
        LookupError: The docstring does not name an argument.
    """
    if "__init__" not in vars(kind):
        return
    said = docstring_parser.parse(kind.__doc__ or "").params
    meanings = {p.arg_name: " ".join((p.description or "").split()) for p in said}
    for name, parameter in inspect.signature(kind).parameters.items():
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
            continue
        if name not in meanings:
            raise LookupError(f"{kind.__name__} does not say what {name} is")
        form, default = annotation(parameter.annotation), repr(parameter.default)
        cells = [inline(name), inline(form), inline(default), meanings[name].replace("|", "&#124;")]
        yield f"| {' | '.join(cells)} |"


def annotation(form: Any) -> str:
    """Return a type as it is written, without the modules of its names."""
    if get_origin(form) in (Union, UnionType):
        return " | ".join(map(annotation, get_args(form)))
    if get_origin(form) is Literal:
        return " | ".join(map(repr, get_args(form)))
    name = form.__name__ if isinstance(form, type) and not get_args(form) else str(form)
    return re.sub(r"\b(?:[a-z_]+\.)+(?=[A-Z])", "", name).replace("NoneType", "None")


def inline(text: str) -> str:
    """Return code that may stand in a cell of a table, which a bar would end."""
    return f"<code>{html.escape(text, quote=False).replace('|', '&#124;')}</code>"


def commands_page() -> str:
    """Return the page with what every command's own parser says of it."""
    with width(80):
        whole = printed_help()
        found = {name: find_parser(name).format_help() for name in sorted(COMMANDS)}
        found["fit --islands"] = find_parser("fit_islands").format_help()
    lines = [
        "# Command line",
        "`fit`, `validate`, `test` and `predict` are those of Lightning's command line, for any "
        "LightningModule: `lightning-par fit --help` lists every option, of the Trainer and of "
        "the model and the data that a configuration names. The other commands are described "
        "below. `lightning-par --version` says the version.",
        "## lightning-par",
        fenced(whole),
    ]
    for name, text in found.items():
        does = COMMANDS.get(name, "train on several islands of this machine")
        lines += [f"## {name}", f"{does[0].upper()}{does[1:]}.", fenced(text)]
    return "\n\n".join(lines) + "\n"


def error_codes_page() -> str:
    """Return the page with a section for each code: cause, example and cure."""
    lines = [
        "# Error codes",
        "Every [error](errors.md) of this package ends with the code of its cause. "
        "`lightning-par explain LP203` prints what stands here; `lightning-par explain` lists all. "
        "A code keeps its meaning in later versions.",
    ]
    lines += [
        "## An error of Lightning: invalid strategy name",
        "`You selected an invalid strategy name: strategy='hybrid3d'`: nothing has imported "
        "`lightning_par` yet, whose import tells Lightning the names.",
        "**Cure:** `import lightning_par` above the Trainer, or `lightning-par fit`.",
    ]
    for family, about in families().items():
        lines.append(f"## {about}")
        for code, entry in entries().items():
            if code.startswith(family):
                lines.append(f"### {code}: {entry.title} {{ #{code.lower()} }}")
                lines += ["No longer raised."] * entry.retired
                # Not a block, which does not wrap.
                example = inline(f"{entry.example} [lightning-par explain {code}]")
                lines += [entry.cause, example, f"**Cure:** {entry.cure}"]
    return "\n\n".join(lines) + "\n"


def fenced(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


@contextlib.contextmanager
def width(columns: int) -> Iterator[None]:
    """Let help be as wide as the page, whatever terminal this runs in."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(columns)
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def printed_help() -> str:
    """Return what ``lightning-par --help`` prints."""
    given: Any = sys.argv
    sys.argv = ["lightning-par", "--help"]
    try:
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            main()
    finally:
        sys.argv = given
    return printed.getvalue()
