"""The command that shows where every parameter would be."""

import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

from lightning_par.commands import FitArguments, quick_imports
from lightning_par.sizes import ParallelSizes

if TYPE_CHECKING:
    from lightning_par.commands.prediction.run_config import ConfiguredRun
    from lightning_par.engine.memory.placement import ParameterPlacement

__all__ = ["plan"]

_HEAD = ("parameter", "shape", "stage", "divided", "bytes per rank", "whole under tp because")


def plan(*, all: bool = False, fit: FitArguments) -> None:  # noqa: A002 - the option's name
    """Show how every parameter would be sharded, and why some stay whole, before anything runs.

    Takes the arguments of ``lightning-par fit``: ``--config my.yaml``. The model is built on the
    meta device: no weights, no processes.

    Args:
        all: A row for every parameter; else equal blocks share one.
        fit: Arguments of fit.

    Raises:
        LightningParError: The model cannot be sharded over a mesh of these sizes.
    """
    with quick_imports():
        from lightning_par.commands.prediction.run_config import configure

    run = configure(fit, on_meta=True, on_cpu=True)
    strategy = run.strategy
    _infer(run)
    placements = _place(run)
    rows = [_row(p) for p in placements]
    rows = rows if all else _merge_blocks(rows)
    stage = strategy.options.zero_stage
    print(f"{type(run.model).__name__} on {strategy.sizes}, zero_stage {stage}\n")
    print(*_format([_HEAD, *rows]), "", *_totals(placements, strategy.sizes), sep="\n")


def _infer(run: "ConfiguredRun") -> None:
    """Build the model; print and take the inferred plan where the model declares none."""
    from lightning_par.inference.infer import describe_inferred

    run.build_model()
    if (plan := run.take_inferred_plan()) is not None:
        said = describe_inferred(plan, run.model)
        print(f"{type(run.model).__name__} declares no plan; inferred:\n{said}\n")


def _place(run: "ConfiguredRun") -> "list[ParameterPlacement]":
    """Return where every parameter would be, without creating a process group."""
    from lightning_par.engine.memory.placement import find_placements
    from lightning_par.strategies.setup.checks import check_module

    options, sizes = run.strategy.options, run.strategy.sizes
    return find_placements(
        run.model,
        check_module(run.model, options, sizes),
        sizes,
        rank_of_stage=options.place_stages(sizes.pipeline),
        stage_blocks=options.stage_blocks,
    )


def _row(placement: "ParameterPlacement") -> tuple[str, ...]:
    shards = ", ".join(f"dim {cut.dim} by {cut.axis} {cut.parts}" for cut in placement.cuts)
    ties = f" = {', '.join(placement.ties)}" if placement.ties else ""
    return (
        placement.name + ties,
        str(list(placement.shape)),
        ", ".join(map(str, placement.stages)),
        shards or "whole",
        f"{placement.most_bytes:,}",  # shards may be uneven: the fullest rank counts
        placement.reason,
    )


def _merge_blocks(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Merge the rows that differ only in the index of the block: ``layers.0-2.norm``."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, *rest in rows:
        groups.setdefault((re.sub(r"\.\d+\.", ".*.", name), *rest), []).append(name)
    merged = []
    for (pattern, *rest), names in groups.items():
        numbers = [int(n) for name in names for n in re.findall(r"\.(\d+)\.", name)[:1]]
        if pattern.count("*") != 1 or len(names) == 1:
            # Two indices (experts in a list) or none: ranges of one would mislead.
            merged += [(name, *rest) for name in names]
        elif numbers == list(range(numbers[0], numbers[0] + len(numbers))):
            merged.append((pattern.replace("*", f"{numbers[0]}-{numbers[-1]}"), *rest))
        else:
            merged.append((pattern.replace("*", ",".join(map(str, numbers))), *rest))
    return merged


def _format(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    for row in rows:
        cells = [
            cell.rjust(width) if head.startswith("bytes") else cell.ljust(width)
            for head, cell, width in zip(_HEAD, row, widths, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _totals(placements: "Sequence[ParameterPlacement]", sizes: ParallelSizes) -> Iterator[str]:
    from lightning_par.engine.memory.placement import count_rank_kinds

    whole = sum(prod(p.shape) * p.dtype.itemsize for p in placements)
    for kind in count_rank_kinds(placements, sizes):
        alike = f"{kind.count:,} ranks as " if kind.count > 1 else ""
        share = f"{kind.size:,} bytes of weights, {kind.size / whole:.1%} of the model"
        yield f"{alike}{sizes.describe(kind.first)}: {share}"
