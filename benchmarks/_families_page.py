"""The page of the guide that `families.py` writes: what each family does on each layout."""

import re
import textwrap
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import transformers

__all__ = ["page_of"]

Table = Mapping[str, Mapping[str, str]]
"""Family -> layout -> outcome."""

ALONE = "one process"
"""The layout of families that the script itself cannot train."""
NAMES = {
    "tp2": "tp 2",
    "pp2": "pp 2",
    "tp2pp2": "tp 2 x pp 2",
    "zero3": "ZeRO 3",
    "cp2": "cp 2",
    "zero1ep2": "ep 2",
    "zero1ep2pp2": "ep 2 x pp 2",
    "zero1ep2tp2": "ep 2 x tp 2",
}
KINDS = ("equal", "refused", "DIFFERS", "crashes", "hangs")
_TOP = """
What each causal language model of transformers {version} does on each layout, without a plan of
the user: a model with few, small layers and random weights trains three steps in float64. Losses
and weights are compared with the same steps on one process (tolerance 1e-5). The [proof of the
first step](verify.md) is off, so that a wrong plan would be seen as one. ep: [experts over
replicas](experts.md#experts-of-transformers), of the families for which transformers has an
expert-parallel plan. This command writes the page:
"""
_COLUMNS = "\n| layout | families | equal | refused | different | crashed | hung |\n"
_COLUMNS += "|---|---|---|---|---|---|---|\n"
_COMMAND = "python benchmarks/families.py --page docs/families.md --layouts"


def page_of(table: Table, missing: Mapping[str, Sequence[str]]) -> str:
    """Return Markdown.

    Args:
        table: As `families.py` finds it.
        missing: Family -> layouts on which it was not trained.
    """
    counts = Counter((k, _kind(v)) for cells in table.values() for k, v in cells.items())
    layouts = [layout for layout in NAMES if any(layout in cells for cells in table.values())]
    top = _filled(_TOP.format(version=transformers.__version__))
    page = [f"# Families of transformers on every layout\n\n{top}\n\n"]
    page.append(f"```\n{_COMMAND} {' '.join(layouts)}\n```\n{_COLUMNS}")
    for layout in layouts:
        numbers = [counts[layout, kind] for kind in KINDS]
        page.append(f"| {NAMES[layout]} | {sum(numbers)} | {' | '.join(map(str, numbers))} |\n")
    trained = {f: c for f, c in table.items() if ALONE not in c}
    equal = [f for f, cells in trained.items() if all(_kind(v) == "equal" for v in cells.values())]
    page.append(f"\n## Equal on every layout that was measured\n\n{_filled(', '.join(equal))}.\n")
    for kind, title in zip(KINDS[1:], ("Refused", "Different", "Crashed", "Hung"), strict=True):
        page += _section(title, kind, trained)
    failed = {f: cells[ALONE] for f, cells in table.items() if ALONE in cells}
    page.append("\n## Not trained by the script\n\n| families | on one process |\n|---|---|\n")
    page += [f"| {f} | {_cell(_last(text), 120)} |\n" for f, text in failed.items()]
    page += _not_measured(missing)
    return "".join(page)


def _not_measured(missing: Mapping[str, Sequence[str]]) -> list[str]:
    by_layouts: dict[str, list[str]] = defaultdict(list)
    for family, layouts in missing.items():
        by_layouts[", ".join(NAMES[layout] for layout in NAMES if layout in layouts)].append(family)
    if not by_layouts:
        return []
    lines = ["\n## Not measured\n\n| layouts | families |\n|---|---|\n"]
    return lines + [f"| {names} | {', '.join(f)} |\n" for names, f in by_layouts.items()]


def _section(title: str, kind: str, table: Table) -> list[str]:
    """Return the lines of a kind of outcomes: one for each reason."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for family, cells in table.items():
        for layout in NAMES:
            if layout in cells and _kind(cells[layout]) == kind:
                found[_reason(cells[layout])][family].append(NAMES[layout])
    if not found:
        return []
    lines = [f"\n## {title}\n\n| reason | layouts | families |\n|---|---|---|\n"]
    for reason, families in sorted(found.items(), key=lambda item: -len(item[1])):
        by_layouts: dict[str, list[str]] = defaultdict(list)
        for family, layouts in families.items():
            by_layouts[", ".join(layouts)].append(family)
        for layouts, names in by_layouts.items():
            lines.append(f"| {_cell(reason, 200)} | {layouts} | {', '.join(names)} |\n")
    return lines


def _kind(outcome: str) -> str:
    return outcome.partition(":")[0]


def _reason(outcome: str) -> str:
    """Return the first sentence of a message without what differs from model to model."""
    text = outcome.partition(": ")[2]
    code = re.search(r"lightning-par explain (LP\d+)", text)
    text = re.sub(r"^\w+=\d+: ", "", text)  # the size that was asked for
    text = re.sub(r"^(net\.\S+|\w+) \(\S+:\d+\) ", "", text)  # a class, and its line
    text = re.sub(r"^\S*?[A-Z]\w+[A-Z]\w+ ", "the model ", text)
    text = re.sub(r"(,? of shape \([\d, ]+\),?|=\d+|to chunks of \d+ tokens)", "", text)
    sentence = re.split(r"\. |, but |, so |: the loss is | \[lightning-par", text)[0]
    return f"{sentence} ({code[1]})" if code else sentence


def _last(error: str) -> str:
    """Return the error of the model, without that of the rank."""
    return error.partition("\n")[0].rpartition("failed in train: ")[2]


def _cell(text: str, most: int) -> str:
    return textwrap.shorten(text.replace("|", "/"), most, placeholder=" ...")


def _filled(text: str) -> str:
    return "\n".join(textwrap.wrap(text.strip(), 150, break_on_hyphens=False))
