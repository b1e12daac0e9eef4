"""Writes one HTML file, which needs nothing else: a timeline to zoom into, and tables.

The tables are in the file as they are; only the timeline is drawn by the script in it.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from lightning_par.engine.pipeline.actions import TimedAction
from lightning_par.profiling.pipeline_record import RankRecord

__all__ = ["Report", "Table", "write_report"]

_TEMPLATE = "report.html"


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table of the report.

    Attributes:
        key: Id of the element.
        title: Above it.
        note: Below the title: what the columns mean.
        columns: Headings.
        rows: Cells as text; numbers are set to the right.
    """

    key: str
    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What goes into the file.

    Attributes:
        title: Of the page.
        headline: Figures at the top: label -> text.
        remarks: Sentences below them.
        records: The steps of every rank, on one clock.
        predicted: The simulated actions of one pipeline, in seconds; empty without one.
        tables: In order.
    """

    title: str
    headline: Mapping[str, str]
    remarks: Sequence[str]
    records: Sequence[RankRecord]
    predicted: Sequence[Sequence[TimedAction]]
    tables: Sequence[Table]


def write_report(report: Report, path: Path) -> Path:
    """Write the report.

    Args:
        report: What goes into it.
        path: Where to; its folder exists.
    """
    text = files("lightning_par.profiling").joinpath(_TEMPLATE).read_text()
    parts = {
        "title": escape(report.title),
        "headline": "\n".join(_figure(*item) for item in report.headline.items()),
        "remarks": "\n".join(f"<p>{escape(remark)}</p>" for remark in report.remarks),
        "tables": "\n".join(map(_table, report.tables)),
        # A script element ends at "</", wherever that stands.
        "data": json.dumps(_data(report), separators=(",", ":")).replace("</", "<\\/"),
    }
    for name, part in parts.items():
        text = text.replace(f"<!--{name}-->", part)
    path.write_text(text)
    return path


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
    return "".join(f"<td{_side(cell)}>{escape(cell)}</td>" for cell in row)


def _side(cell: str) -> str:
    """Numbers are set to the right."""
    return " class=number" if cell[:1].isdigit() or cell[:1] in ("-", "+") else ""


def _data(report: Report) -> dict[str, Any]:
    """Return what the timeline is drawn from; times are milliseconds from the first start."""
    steps = [step for record in report.records for step in record.steps]
    origin = min((step.start for step in steps), default=0.0)
    last = max((step.step for step in steps), default=0)
    actions = [action for s in steps if s.step == last for action in s.actions]
    # What is predicted begins where the last step's first action does.
    shift = min((action.start for action in actions), default=origin)
    rows = [_rank_row(record, origin) for record in report.records]
    rows += [
        {"name": f"predicted, rank {rank}", "steps": [], "waits": [], "actions": drawn}
        for rank, drawn in enumerate(
            [_drawn(event, origin - shift, 0.0) for event in row] for row in report.predicted
        )
    ]
    return {"rows": rows}


def _rank_row(record: RankRecord, origin: float) -> dict[str, Any]:
    return {
        "name": record.name,
        "steps": [[s.step, _ms(s.start - origin), _ms(s.end - origin)] for s in record.steps],
        "actions": [
            _drawn(event, origin, wait)
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


def _drawn(event: TimedAction, origin: float, wait: float) -> list[Any]:
    action = event.action
    times = _ms(event.start - origin), _ms(event.end - origin), _ms(wait)
    return [action.stage, action.kind.value, action.microbatch, *times]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 4)
