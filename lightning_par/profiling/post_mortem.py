"""`post_mortem.rankN.json`: what a rank left in the folder of its run when it died."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from threading import get_ident
from typing import Any

from lightning_par.errors import ConfigurationError
from lightning_par.units import in_words

__all__ = ["Change", "PostMortem", "read_post_mortems", "write_post_mortem"]

_NAME = "post_mortem.rank{}.json"
_FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the run that needs less memory.

    Attributes:
        write: What to write.
        less: Bytes that it saves on this rank by the forecast; None: no forecast was made of it.
        slower: By which fraction the forecast says that a step takes longer; None: likewise.
        note: What else is known of it.
    """

    write: str
    less: float | None = None
    slower: float | None = None
    note: str = ""

    def __str__(self) -> str:
        said = [] if self.less is None else [f"{in_words(self.less)} less"]
        said += [] if self.slower is None else [f"step {self.slower:+.0%}"]
        told = f" (forecast: {', '.join(said)})" if said else ""
        return f"{self.write}{told}{self.note and f'. {self.note}'}"


@dataclass(frozen=True, kw_only=True)
class PostMortem:
    """What is known of a rank that died.

    Attributes:
        rank: Global rank.
        name: Its place on the mesh.
        when: Local time.
        summary: What happened, where, and why, in one line.
        counted: What held memory, as counted -> bytes.
        forecast: What the memory model says of the peak of such a step -> bytes; empty: nothing.
        unforeseen: Why there is no forecast; empty if there is one.
        changes: What needs less memory, the least costly first.
        fits: Whether each of `changes` fits by the forecast, or none of them does; None: not known.
        steps: Of some of the last steps: number, seconds since the run began, bytes held after it.
    """

    rank: int
    name: str
    when: str
    summary: str
    counted: Mapping[str, float] = field(default_factory=dict)
    forecast: Mapping[str, float] = field(default_factory=dict)
    unforeseen: str = ""
    changes: Sequence[Change] = ()
    fits: bool | None = None
    steps: Sequence[tuple[int, float, int]] = ()

    def lines(self) -> Iterator[str]:
        """Yield what there is to say, the summary first."""
        yield self.summary
        if self.counted:
            yield f"Memory of this rank, counted: {_rows(self.counted)}"
        if self.forecast:
            yield f"Predicted peak of this step: {_rows(self.forecast)}"
        elif self.unforeseen:
            yield f"The peak of this step cannot be predicted: {self.unforeseen}"
        if self.changes:
            yield {
                True: "Use one of these changes; each fits by the forecast:",
                False: "None of these changes is sure to be enough alone; try several:",
                None: "Use one of these changes; whether they fit is not known:",
            }[self.fits]
        elif self.forecast:
            yield (
                "No change of this layout reduces the memory of this rank: use more devices, or a "
                "smaller model"
            )
        yield from (f"  - {change}" for change in self.changes)

    def last_steps(self) -> Iterator[str]:
        """Yield a line for each of the last steps."""
        for step, seconds, held in self.steps:
            yield f"  after step {step}, at {seconds:.1f} s: {in_words(held)} held"


def _rows(sizes: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {in_words(size)}" for kind, size in sizes.items())


def write_post_mortem(found: PostMortem, folder: Path) -> Path:
    """Write what is known into the folder of a run; return the file.

    Raises:
        OSError: It cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _NAME.format(found.rank)
    # A rank that is killed meanwhile leaves no half of it; each thread writes its own.
    partial = path.with_name(f"{path.name}.{get_ident()}.partial")
    try:
        partial.write_text(json.dumps({"format": _FORMAT, **asdict(found)}, indent=2) + "\n")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def read_post_mortems(folder: Path, refuse: Callable[[str], object] = bool) -> list[PostMortem]:
    """Return what the ranks of a run have left, in the order of their ranks.

    Args:
        folder: Directory of the run, or one of its files.
        refuse: Called with why a file cannot be read where others can.

    Raises:
        ConfigurationError: There is nothing, or none of it can be read.
    """
    paths = [folder] if folder.is_file() else sorted(folder.rglob(_NAME.format("*")))
    if not paths:
        raise ConfigurationError(
            "LP809",
            f"there is no file post_mortem.rank*.json in '{folder}'. A rank writes this file when "
            "it runs out of memory, or when another rank does not answer. The file is in "
            "trainer.log_dir or, without a logger, next to the checkpoints: pass that folder. A "
            "run that has neither a logger nor checkpoints, or whose folder is a URL, writes no "
            "such file.",
        )
    found, problems = list[PostMortem](), list[ConfigurationError]()
    for path in paths:
        try:
            found.append(_read(path))
        except ConfigurationError as error:
            problems.append(error)
    if not found:
        raise problems[0]
    for problem in problems:
        refuse(problem.message)
    return sorted(found, key=lambda each: each.rank)


def _read(path: Path) -> PostMortem:
    try:
        given: Any = json.loads(path.read_text())
        if given["format"] != _FORMAT:
            raise ValueError(f"its format is {given['format']}, not {_FORMAT}")
        values = {each.name: given[each.name] for each in fields(PostMortem)}
        values["rank"] = int(values["rank"])
        values["changes"] = [Change(**each) for each in values["changes"]]
        made = PostMortem(**values)
        # What cannot be said was written by someone else.
        _ = [*made.lines(), *made.last_steps()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            "LP809",
            f"{path} cannot be read as the post-mortem of a rank: {type(error).__name__}: "
            f"{error}. Pass the folder of a run of this version of lightning_par.",
        ) from error
    return made
