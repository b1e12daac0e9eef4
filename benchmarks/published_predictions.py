"""Puts the planner's predictions beside published measurements, each by constants fitted on others.

    python benchmarks/published_predictions.py [--only vtrain noise h100 regret ...]

Constants for a group of rows are fitted on the other groups. Beside it: every step at the others'
median MFU, and at the MFU of the most similar of the others.
"""

import argparse
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from statistics import mean, median
from typing import Literal

from _fit import fit, leave_out
from _noise import deviations, noise_regrets
from _published import (
    A100,
    H100,
    h100_tables,
    llama_shape,
    Measured,
    MEGATRON_2021,
    MEGATRON_2023,
    read,
    TORCHTITAN,
    vtrain,
    zero_bubble_shape,
)

from lightning_par.errors import MeshError
from lightning_par.planner.constants import Constants
from lightning_par.planner.layouts import LayoutSpace
from lightning_par.planner.memory import predict_memory
from lightning_par.planner.search import Planner
from lightning_par.planner.shapes import Implementation, Layout, TransformerShape
from lightning_par.sizes import ParallelSizes

Found = list[tuple[Measured, float, float, float]]


def main() -> None:
    """Print the sections that are asked for."""
    sections: dict[str, Callable[[], None]] = {
        "vtrain": _vtrain,
        "noise": _noise,
        "h100": _h100,
        "regret": _regret,
        "memory": _memory,
        "tables": _tables,
        "others": _others,
        "claims": _claims,
        "search": _search,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sections, default=list(sections))
    for name in parser.parse_args().only:
        print(f"\n## {name}\n")
        sections[name]()


@cache
def _by_model() -> Found:
    return leave_out(vtrain(), lambda row: row.problem, "a100")


def _errors(pairs: Iterable[tuple[float, float]]) -> str:
    found = sorted(abs(predicted / seconds - 1) for predicted, seconds in pairs)
    return f"{mean(found):6.1%} {median(found):6.1%}"


def _print_errors(found: Found, key: Callable[[Measured], str]) -> None:
    groups: dict[str, Found] = defaultdict(list)
    for item in found:
        groups[key(item[0])].append(item)
    print("| rows | | planner: mean, median | constant MFU | most similar run |")
    print("|---|---|---|---|---|")
    for name, items in (*sorted(groups.items()), ("all", found)):
        cells = (_errors((item[i], item[0].seconds) for item in items) for i in (1, 2, 3))
        print(f"| {name} | {len(items)} | {' | '.join(cells)} |", flush=True)


def _vtrain() -> None:
    print("leaving one model out:\n")
    _print_errors(_by_model(), lambda row: row.problem)
    print("\nleaving one number of devices out:\n")
    sizes = leave_out(vtrain(), lambda row: row.table, "a100")
    _print_errors(sizes, lambda row: row.table)
    print(f"\nall rows: {fit(vtrain(), 'a100')}")


def _noise() -> None:
    """How well a run is known from its two neighbors, which differ in their micro-batch only, and
    the regret of one who knows what every run takes without noise.
    """
    lines: dict[tuple[str, int, int], list[Measured]] = defaultdict(list)
    for row in vtrain():
        lines[row.problem, row.layout.sizes.tensor, row.layout.sizes.pipeline].append(row)
    pairs, inner = [], set()
    for line in lines.values():
        ordered = sorted(line, key=lambda row: row.layout.micro_batch)
        for before, row, after in zip(ordered, ordered[1:], ordered[2:], strict=False):
            sizes = [math.log(one.layout.micro_batch) for one in (before, row, after)]
            if len(set(sizes)) < 3:
                continue
            share = (sizes[1] - sizes[0]) / (sizes[2] - sizes[0])
            pairs.append((before.seconds ** (1 - share) * after.seconds**share, row.seconds))
            inner.add(row)
    ours = [(item[1], item[0].seconds) for item in _by_model() if item[0] in inner]
    print(f"{len(pairs)} runs between two others: mean, median")
    print(f"on the line between those: {_errors(pairs)}; the planner: {_errors(ours)}\n")
    known = [item[:2] for item in _by_model()]
    noise = deviations(known)
    print(f"{len(noise)} deviations from a line's median; regret by them alone:")
    for first, target in ((1, 0.03), (3, 0.005)):
        found = noise_regrets(known, noise, first)
        within = mean(regret <= target for regret in found)
        print(f"best of {first}: {mean(found):.1%}, within {target:.1%} in {within:.0%} of draws")


def _h100() -> None:
    _print_errors(leave_out(h100_tables(), lambda row: row.table, "h100"), lambda r: r.table)
    print(f"\nall rows: {fit(h100_tables(), 'h100')}")


def _regret() -> None:
    """How much slower the chosen layout is than the best one measured, of the same problem.

    Every table that measured several layouts of one problem; of vTrain's runs and of torchtitan's
    405B constants do not rest on the model or the table, and none rests on the steps of the others.
    The rule beside it: tensor parallelism over a node, then as few stages as were tried, then the
    smallest micro-batch, then the first in the table. What a search never chooses comes last.
    """
    print("| table | problem | layouts | the chosen | best of first three | rule |")
    print("|---|---|---|---|---|---|")
    constants = fit(vtrain(), "a100")
    tables: dict[str, list[tuple[Measured, float]]] = {
        "vTrain": [(item[0], item[1]) for item in _by_model()],
        **{
            name: [(row, row.predict(constants)) for row in rows]
            for name, rows in {
                "zero-bubble": [row for column in _ZERO_BUBBLE for row in _zero_bubble(column)],
                "Korthikanti": [*_korthikanti("full"), *_korthikanti("selective")],
                "Megatron-LM 2": [*_table2("ZeRO-3"), *_table2("PTD")],
            }.items()
        },
        "torchtitan 5": _torchtitan_405b(),
    }
    for table, items in tables.items():
        _print_regrets(table, items)


def _torchtitan_405b() -> list[tuple[Measured, float]]:
    """Interleaved stages or not, by constants of the other tables of H100s."""
    rows = [row for row in h100_tables() if row.table != "torchtitan 5"]
    constants = fit(rows, "h100")
    found = [row for row in h100_tables() if row.table == "torchtitan 5"]
    return [(replace(row, problem="405B"), row.predict(constants)) for row in found]


def _print_regrets(table: str, items: Iterable[tuple[Measured, float]]) -> None:
    problems: dict[str, list[tuple[Measured, float]]] = defaultdict(list)
    for row, predicted in items:
        problems[row.problem].append((row, predicted if _searched(row) else math.inf))
    regrets = []
    for name, pairs in problems.items():
        if len(pairs) < 2:
            continue
        best = min(row.seconds for row, _ in pairs)
        order = [row for row, _ in sorted(pairs, key=lambda pair: pair[1])]
        ruled = min((row for row, _ in pairs), key=_rule)
        chosen = (order[0].seconds, min(row.seconds for row in order[:3]), ruled.seconds)
        regrets.append([seconds / best - 1 for seconds in chosen])
        cells = " | ".join(f"{regret:.1%}" for regret in regrets[-1])
        print(f"| {table} | {name} | {len(pairs)} | {cells} |")
    cells = " | ".join(f"{mean(column):.1%}" for column in zip(*regrets, strict=True))
    print(f"| {table} | mean | | {cells} |", flush=True)


def _searched(row: Measured) -> bool:
    """Return whether a search looks at a layout: not ZeRO stage 3 over too many nodes."""
    nodes = row.layout.sizes.data_shard / row.device.node
    return row.layout.zero_stage < 3 or nodes <= LayoutSpace.most_gathering_nodes


def _rule(row: Measured) -> tuple[int, int, int]:
    sizes = row.layout.sizes
    return (abs(sizes.tensor - 8), sizes.pipeline, row.layout.micro_batch)


def _memory() -> None:
    """Qi et al., table 4: without recomputation, scores are written; interleaved stages of one
    block, of which the first and the last are empty where blocks are missing.
    """
    names = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-2p": "zb-h2"}
    errors: dict[str, list[float]] = defaultdict(list)
    for row in read("zero_bubble_tables_3_4_5_9"):
        p, layers = int(row["stages"]), int(row["layers"])
        shape = zero_bubble_shape(row)
        for column, schedule in names.items():
            virtual = (layers + 2) // p
            edges = (0, *[1] * (p * virtual - 2), 0)
            layout = Layout(
                sizes=ParallelSizes(pipeline=p),
                micro_batch=int(row["micro_batch"]),
                microbatches=int(row["microbatches"]),
                schedule=schedule,
                virtual=virtual,
                blocks=edges if schedule == "interleaved" else (),
            )
            peak = predict_memory(
                shape, layout, Implementation(fused_attention=False, fsdp=False)
            ).peak
            errors[column].append(peak / 1e9 / float(row[f"mem_{column}"]) - 1)
    print("| schedule | mean error | bias | largest |")
    print("|---|---|---|---|")
    errors["all"] = [error for found in errors.values() for error in found]
    for column, found in errors.items():
        sizes = [abs(e) for e in found]
        print(f"| {column} | {mean(sizes):.1%} | {mean(found):+.1%} | {max(sizes):.1%} |")


def _tables() -> None:
    """Megatron-LM's tables, by constants fitted on vTrain's runs alone."""
    constants = fit(vtrain(), "a100")
    for name, rows in (
        ("megatron_sc21_table1", _table1()),
        ("megatron_sc21_table2_zero3", _table2("ZeRO-3")),
    ):
        errors = [row.predict(constants) / row.seconds - 1 for row in rows]
        shown = " ".join(f"{row.problem} {e:+.0%}," for row, e in zip(rows, errors, strict=True))
        print(f"{name}: mean {mean(map(abs, errors)):.1%}: {shown.rstrip(',')}\n")


def _gpt(layers: int, dim: int, heads: int) -> TransformerShape:
    return TransformerShape(
        layers=layers, model_dim=dim, heads=heads, length=2048, vocab=51_200, dropout=True
    )


def _table1() -> list[Measured]:
    found = []
    for row in read("megatron_sc21_table1"):
        tensor, pipeline, devices = int(row["tp"]), int(row["pp"]), int(row["gpus"])
        data, micro = devices // tensor // pipeline, int(row["micro_batch"])
        batch, virtual = int(row["global_batch"]), int(row["vpp_chunks"])
        shape = _gpt(int(row["layers"]), int(row["hidden"]), int(row["heads"]))
        layout = Layout(
            sizes=ParallelSizes(tensor=tensor, pipeline=pipeline, data_replicate=data),
            micro_batch=micro,
            microbatches=batch // data // micro,
            zero_stage=0,
            schedule="interleaved" if virtual > 1 else "1f1b",
            virtual=virtual,
            recompute="full",
            sequence_parallel=False,
        )
        seconds = _with_recomputation(shape, batch) / (
            float(row["tflops_per_gpu"]) * 1e12 * devices
        )
        found.append(_measured(row["model"], shape, layout, seconds))
    return found


def _table2(scheme: Literal["ZeRO-3", "PTD"]) -> list[Measured]:
    """96 blocks of 12,288, 105 of 20,480; of PTD, tensor 8 and the rest of a model's devices
    pipeline stages, without virtual ones, are assumed.
    """
    found = []
    for row in read("megatron_sc21_table2_zero3"):
        if row["scheme"] != scheme:
            continue
        small = float(row["params_b"]) < 200
        shape = _gpt(96, 12_288, 96) if small else _gpt(105, 20_480, 128)
        devices, batch, micro = (int(row[k]) for k in ("gpus", "global_batch", "micro_batch"))
        model = int(row["model_parallel"])
        sharded, data = scheme == "ZeRO-3", devices // model
        tensor = 1 if sharded else 8
        layout = Layout(
            sizes=ParallelSizes(
                tensor=tensor,
                pipeline=model // tensor,
                data_shard=data if sharded else 1,
                data_replicate=1 if sharded else data,
            ),
            micro_batch=micro,
            microbatches=max(1, batch // data // micro),
            zero_stage=3 if sharded else 0,
            recompute="full",
            sequence_parallel=sharded,
        )
        rate = float(row["tflops_per_gpu"]) * 1e12 * devices
        seconds = _with_recomputation(shape, batch) / rate
        found.append(_measured(f"{row['params_b']}B on {devices}", shape, layout, seconds))
    return found


def _with_recomputation(shape: TransformerShape, batch: int) -> float:
    """Return the FLOPs that Megatron-LM's TFLOP/s count: 2104.04473, equation 3."""
    scores = 1 + shape.length / (6 * shape.model_dim)
    head = shape.vocab / (16 * shape.layers * shape.model_dim)
    return 96 * batch * shape.length * shape.layers * shape.model_dim**2 * (scores + head)


def _measured(name: str, shape: TransformerShape, layout: Layout, seconds: float) -> Measured:
    return Measured(
        table="Megatron-LM",
        problem=name,
        shape=shape,
        layout=layout,
        device=A100,
        code=MEGATRON_2021,
        seconds=seconds,
    )


def _others() -> None:
    """Tables that no constant rests on, by constants of vTrain's runs.

    zero-bubble: times of single stages of these runs are in every fit for A100s; steps are not.
    """
    constants = fit(vtrain(), "a100")
    print("| table | rows | mean error | bias | largest | row by row |")
    print("|---|---|---|---|---|---|")
    for name, rows in (
        ("Korthikanti, full recomputation", _korthikanti("full")),
        ("Korthikanti, selective and sequences", _korthikanti("selective")),
        ("torchtitan, 64 A100s", _torchtitan_a100()),
        *((f"zero-bubble, {name}", _zero_bubble(name)) for name in _ZERO_BUBBLE),
    ):
        errors = [row.predict(constants) / row.seconds - 1 for row in rows]
        sizes = [abs(error) for error in errors]
        shown = ", ".join(f"{r.problem} {e:+.0%}" for r, e in zip(rows, errors, strict=True))
        print(
            f"| {name} | {len(rows)} | {mean(sizes):.1%} | {mean(errors):+.1%} | {max(sizes):.1%} "
            f"| {shown} |"
        )


_ZERO_BUBBLE = {"1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-1p": "zb-h1", "ZB-2p": "zb-h2"}


def _korthikanti(recompute: Literal["full", "selective"]) -> list[Measured]:
    """Table 5; the selective rows also divide activations along the sequence."""
    found, column = [], {"full": "full_recompute_s", "selective": "selective_sp_s"}[recompute]
    for row in read("korthikanti_table5_iteration_time"):
        tensor, pipeline, micro = int(row["tp"]), int(row["pp"]), int(row["micro_batch"])
        virtual = int(row["vpp_chunks"])
        layout = Layout(
            sizes=ParallelSizes(tensor=tensor, pipeline=pipeline),
            micro_batch=micro,
            microbatches=int(row["global_batch"]) // micro,
            zero_stage=0,
            schedule="interleaved" if virtual > 1 else "1f1b",
            virtual=virtual,
            recompute=recompute,
            sequence_parallel=recompute == "selective",
        )
        shape = _gpt(int(row["layers"]), int(row["hidden"]), int(row["heads"]))
        found.append(_measured(row["model"], shape, layout, float(row[column])))
    return found


def _torchtitan_a100() -> list[Measured]:
    """Without the rows that recompute every second block, which a layout cannot say."""
    found = []
    for row in read("torchtitan_a100_2024"):
        if row["ac"] == "selective layer":
            continue
        family, name = row["model"].split("-")
        length, batch = int(row["seq"]), int(row["local_batch"])
        layout = Layout(
            sizes=ParallelSizes(data_shard=64),
            micro_batch=batch,
            microbatches=1,
            zero_stage=3,
            recompute={"none": "none", "full": "full", "selective op": "selective"}[row["ac"]],
        )
        shape = llama_shape(name, length, 32_000 if family == "llama2" else 128_256)
        seconds = batch * length / float(row["wps_per_gpu"])
        measured = _measured(f"{row['model']} {row['ac']}", shape, layout, seconds)
        found.append(replace(measured, code=TORCHTITAN))
    return found


def _zero_bubble(column: str) -> list[Measured]:
    found, schedule = [], _ZERO_BUBBLE[column]
    for row in read("zero_bubble_tables_3_4_5_9"):
        p, layers, pieces = int(row["stages"]), int(row["layers"]), int(row["microbatches"])
        some = (layers + 2) // p
        interleaved = schedule == "interleaved"
        layout = Layout(
            sizes=ParallelSizes(pipeline=p),
            micro_batch=int(row["micro_batch"]),
            microbatches=pieces,
            schedule=schedule,
            virtual=some if interleaved else 1,
            blocks=(0, *[1] * (p * some - 2), 0)
            if interleaved
            else (some - 1, *[some] * (p - 2), some - 1),
        )
        seconds = layout.samples / (float(row[f"thr_{column}"]) * p)
        measured = _measured(f"{row['model']} {pieces}", zero_bubble_shape(row), layout, seconds)
        found.append(replace(measured, code=MEGATRON_2023))
    return found


_KINDS: dict[str, tuple[tuple[str, int], ...]] = {
    "3D": (),
    "pipeline x data": (("tensor", 1),),
    "tensor x data": (("pipeline", 1),),
    "data alone": (("tensor", 1), ("pipeline", 1)),
}
"""Which sizes a kind of layout fixes; replicas may shard optimizer states, or everything."""


def _claims() -> None:
    """The best layout of each kind that fits: A100s with 80 GB, constants of vTrain's runs."""
    constants = fit(vtrain(), "a100")
    print("| model | devices | samples | ZeRO stages | kind | step, s | 3D is faster by | layout |")
    print("|---|---|---|---|---|---|---|---|")
    for name, shape, devices, samples in (
        ("175B", _gpt(96, 12_288, 96), 512, 1536),
        ("1T", _gpt(128, 25_600, 160), 3072, 3072),
    ):
        for zero in ((0, 1), (0, 1, 2, 3)):
            found = {kind: _best(shape, devices, samples, zero, kind, constants) for kind in _KINDS}
            for kind, one in found.items():
                three = found["3D"]
                gain = f"{one[0] / three[0] - 1:+.0%}" if one and three else ""
                cells = f"{one[0]:.3g} | {gain} | {one[1]}" if one else "none fits | |"
                stages = f"{zero[0]} to {zero[-1]}"
                print(f"| {name} | {devices} | {samples} | {stages} | {kind} | {cells} |")
    print("\n| model | samples | kind | samples/s a device on 64 and 1,024 | efficiency |")
    print("|---|---|---|---|---|")
    shape = _gpt(48, 8192, 64)  # 39B
    for text, few, many in (("4 for each device", 256, 4096), ("1,536", 1536, 1536)):
        for kind in _KINDS:
            ends = ((64, few), (1024, many))
            pair = [(d, n, _best(shape, d, n, (0, 1, 2, 3), kind, constants)) for d, n in ends]
            rates = [n / best[0] / d for d, n, best in pair if best]
            cells = "none fits on one of them | |"
            if len(rates) == 2:
                cells = f"{rates[0]:.3g}, {rates[1]:.3g} | {rates[1] / rates[0]:.0%} |"
            print(f"| 39B | {text} | {kind} | {cells}")


def _best(
    shape: TransformerShape,
    devices: int,
    samples: int,
    zero: tuple[int, ...],
    kind: str,
    constants: Constants,
) -> tuple[float, Layout] | None:
    planner = Planner(shape=shape, device=A100, code=MEGATRON_2023, constants=constants)
    space = LayoutSpace(devices=devices, samples=samples, zero_stages=zero, fixed=_KINDS[kind])
    try:
        best = planner.search(space, beam=64).best[0]
    except MeshError:
        return None
    return best.time.seconds, best.layout


def _search() -> None:
    small = TransformerShape(layers=96, model_dim=12_288, heads=96, length=2048, vocab=50_257)
    large = TransformerShape(layers=105, model_dim=20_480, heads=128, length=2048, vocab=51_200)
    cases: Sequence[tuple[str, TransformerShape, int, int]] = (
        ("175B", small, 1024, 1536),
        ("175B", small, 3072, 3072),
        ("530B", large, 3072, 3072),
    )
    print("| model | devices | layouts | CPU, s | chosen |")
    print("|---|---|---|---|---|")
    for name, shape, devices, samples in cases:
        begin = time.process_time()
        space = LayoutSpace(devices=devices, samples=samples)
        found = Planner(shape=shape, device=H100).search(space)
        spent = time.process_time() - begin
        best = found.best[0]
        print(
            f"| {name} | {devices} | {found.considered} | {spent:.1f} | {best.layout}: "
            f"{best.time.seconds:.3g} s, MFU {best.mfu:.1%} |"
        )


if __name__ == "__main__":
    main()
