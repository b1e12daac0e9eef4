"""Self-contained HTML report: a zoomable timeline and tables.

The tables are plain HTML; only the timeline is drawn by a script, from JSON in the same file.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from lightning_par.engine.pipeline.actions import TimedAction
from lightning_par.profiling.pipeline_record import RankRecord

__all__ = ["Report", "Table", "as_values", "render", "write_report"]

_TEMPLATE = "report.html"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the report.

    Attributes:
        key: HTML id of the table.
        title: Heading above the table.
        note: Text below the heading: what the columns mean.
        columns: Column headings.
        rows: Cells as text, one row as long as `columns`; numbers are right-aligned.
    """

    key: str
    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """Contents of a report.

    Attributes:
        title: Title of the page.
        headline: Key figures at the top: label -> text.
        remarks: Sentences below the key figures.
        records: Records of every rank, on one clock.
        predicted: Simulated actions of one pipeline, per rank, in seconds; empty without a
            pipeline.
        tables: Tables in their order on the page.
    """

    title: str
    headline: Mapping[str, str]
    remarks: Sequence[str]
    records: Sequence[RankRecord]
    predicted: Sequence[Sequence[TimedAction]]
    tables: Sequence[Table]


def write_report(report: Report, path: Path) -> Path:
    """Write a report as one HTML file.

    Args:
        report: Contents of the report.
        path: File to write; its folder exists.

    Returns:
        `path`.
    """
    path.write_text(render(as_values(report)))
    return path


def as_values(report: Report) -> dict[str, Any]:
    """Return what `render` shows, as JSON can hold it.

    Args:
        report: Contents of the report.
    """
    return {
        "title": report.title,
        "headline": dict(report.headline),
        "remarks": list(report.remarks),
        "tables": [asdict(table) for table in report.tables],
        "timeline": _timeline(report),
    }


def render(values: Mapping[str, Any]) -> str:
    """Return the HTML of a report.

    Args:
        values: Of `as_values`.
    """
    text = files("lightning_par.profiling").joinpath(_TEMPLATE).read_text()
    parts = {
        "title": escape(values["title"]),
        "headline": "\n".join(_figure(*item) for item in values["headline"].items()),
        "remarks": "\n".join(f"<p>{escape(remark)}</p>" for remark in values["remarks"]),
        "tables": "\n".join(_table(Table(**table)) for table in values["tables"]),
        # HTML ends a script element at "</" even inside a string of its JSON.
        "data": json.dumps(values["timeline"], separators=(",", ":")).replace("</", "<\\/"),
    }
    for name, part in parts.items():
        text = text.replace(f"<!--{name}-->", part)
    return text


def _figure(label: str, value: str) -> str:
    return f'<div class="figure"><b>{escape(value)}</b><span>{escape(label)}</span></div>'


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = "\n".join(f"<tr>{_cells(row)}</tr>" for row in table.rows)
    return (
        f'<section><h2>{escape(table.title)}</h2><p class="note">{escape(table.note)}</p>'
        f'<table id="{escape(table.key)}"><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{rows}</tbody></table></section>"
    )


def _cells(row: Iterable[str]) -> str:
    return "".join(f"<td{_alignment(cell)}>{escape(cell)}</td>" for cell in row)


def _alignment(cell: str) -> str:
    """Return the class attribute that right-aligns numbers."""
    return " class=number" if cell[:1].isdigit() or cell[:1] in ("-", "+") else ""


def _timeline(report: Report) -> dict[str, Any]:
    """Return the JSON of the timeline; times are milliseconds since the first step's start."""
    steps = [step for record in report.records for step in record.steps]
    origin = min((step.start for step in steps), default=0.0)
    last = max((step.step for step in steps), default=0)
    actions = [action for s in steps if s.step == last for action in s.actions]
    # The predicted timeline starts at 0: align it with the first action of the last step.
    shift = min((action.start for action in actions), default=origin)
    rows = [_rank_row(record, origin) for record in report.records]
    rows += [
        {"name": f"predicted, rank {rank}", "steps": [], "waits": [], "actions": boxes}
        for rank, boxes in enumerate(
            [_action_box(event, origin - shift, 0.0) for event in row] for row in report.predicted
        )
    ]
    return {"rows": rows}


def _rank_row(record: RankRecord, origin: float) -> dict[str, Any]:
    return {
        "name": record.name,
        "steps": [[s.step, _ms(s.start - origin), _ms(s.end - origin)] for s in record.steps],
        "actions": [
            _action_box(event, origin, wait)
            for step in record.steps
            for event, wait in zip(step.actions, step.waits, strict=True)
        ],
        "waits": [
            [t.axis, t.operation, t.payload, _ms(start - origin), _ms(end - origin)]
            for step in record.steps
            for t in step.transfers
            for start, end in t.exposed
        ],
    }


def _action_box(event: TimedAction, origin: float, wait: float) -> list[Any]:
    # A list and not a dict: a report has many thousands of them, and names would double its size.
    action = event.action
    times = _ms(event.start - origin), _ms(event.end - origin), _ms(wait)
    return [action.stage, action.kind.value, action.microbatch, *times]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)  # to 0.1 us: more digits would only make the file larger
