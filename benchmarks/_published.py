"""Published measurements as what the planner predicts: shapes, layouts, devices, seconds.

Sources are in the first line of each file in `published/`. What a table does not say, such as the
micro-batch, is assumed where its rows are read, and said there.
"""

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lightning_par.planner.constants import Constants
from lightning_par.planner.profiles import DeviceProfile, load_profile
from lightning_par.planner.shapes import Implementation, Layout, TransformerShape
from lightning_par.planner.step_time import StepCost
from lightning_par.sizes import ParallelSizes

__all__ = [
    "Measured",
    "MeasuredStage",
    "a100_stages",
    "h100_tables",
    "llama_shape",
    "read",
    "vtrain",
    "zero_bubble_shape",
]

FOLDER = Path(__file__).with_name("published")
A100, H100 = load_profile("a100-80"), load_profile("h100")
# 96 GB of HBM2e at 500 W, as torchtitan's table says; no datasheet. Bandwidth is that of the H100
# NVL per stack. A processor's power grows at least with the square of its clock: voltage follows.
_CLOCK = (500 / 700) ** 0.5
H100_500W = replace(
    H100,
    name="h100-500w",
    flops=H100.flops * _CLOCK,
    fp8_flops=H100.fp8_flops * _CLOCK,
    bandwidth=2400e9,
    memory=96e9,
)
# 800 Gb/s of a node, as the configurations beside the measurements say.
A100_VTRAIN = replace(A100, name="a100-vtrain", network=800e9 / 8 / A100.node)
DEEPSPEED = Implementation(
    fused_attention=False,
    async_tensor=True,
    async_p2p=False,
    sharded_p2p=True,
    overlap_data=False,
    fsdp=False,
    gathers_again=True,
    gradient_bytes=2,
    reduce_bytes=2,
    step_traffic=60,
)
MEGATRON_2021 = replace(DEEPSPEED, gradient_bytes=4, reduce_bytes=4, step_traffic=40)
MEGATRON_2023 = replace(MEGATRON_2021, fused_accumulation=True)
MEGATRON_CORE = Implementation(
    fsdp=False,
    gathers_again=True,
    async_tensor=True,
    fused_accumulation=True,
    fused_tensor=0.5,
    sharded_p2p=True,
    fused_elementwise=0.7,
    selective_share=0.0,
)
TRANSFORMER_ENGINE = replace(MEGATRON_CORE, fp8=True)
TORCHTITAN = Implementation(
    fsdp=False,  # context ranks share states, too
    weight_bytes=4,
    state_bytes=8,
    step_traffic=28,
    selective_share=0.2,
    attention_rates=(0.47, 0.38),
)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A row of a table: what ran, and how long a step took.

    Attributes:
        table: Rows of one table are left out together.
        problem: Rows with the same are layouts of one problem.
    """

    table: str
    problem: str
    shape: TransformerShape
    layout: Layout
    device: DeviceProfile
    code: Implementation
    seconds: float

    def predict(self, constants: Constants) -> float:
        """Return the predicted seconds of the step."""
        cost = StepCost(self.shape, self.layout, self.device, self.code, constants)
        return cost.predict().seconds

    def estimate(self, constants: Constants) -> float:
        """Return the same with the pipeline in closed form, which is fast enough to fit."""
        cost = StepCost(self.shape, self.layout, self.device, self.code, constants)
        return cost.estimate()

    def at_mfu(self, mfu: float) -> float:
        """Return the seconds of the step at a share of the device's 16-bit peak."""
        flops = self.shape.flops(self.layout.samples)
        return flops / (mfu * self.layout.sizes.world_size * self.device.flops)

    @property
    def mfu(self) -> float:
        """The measured share."""
        return self.at_mfu(1.0) / self.seconds

    def distance(self, other: "Measured") -> float:
        """Return how unlike two runs are: logarithms of their sizes."""
        pairs = zip(self._sizes(), other._sizes(), strict=True)
        return sum(abs(math.log(a / b)) for a, b in pairs)

    def _sizes(self) -> tuple[float, ...]:
        sizes = self.layout.sizes
        degrees = (sizes.tensor, sizes.pipeline, sizes.context, self.layout.micro_batch)
        return (self.shape.parameters, self.shape.length, sizes.world_size, *degrees)


def read(name: str) -> list[dict[str, str]]:
    """Return the rows of a file, without its line of sources."""
    text = (FOLDER / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in text if not line.startswith("#")))


def vtrain() -> list[Measured]:
    """109 runs of Megatron-DeepSpeed: full recomputation, fp16; the vocabulary is assumed."""
    found = []
    for row in read("vtrain_measured_multi"):
        values = list(map(float, row.values()))
        tensor, data, pipeline = map(int, values[8:11])
        batch, micro, dim, heads, layers, length = map(int, values[2:8])
        layout = Layout(
            sizes=ParallelSizes(tensor=tensor, data_shard=data, pipeline=pipeline),
            micro_batch=micro,
            microbatches=batch // data // micro,
            recompute="full",
            sequence_parallel=False,
        )
        shape = TransformerShape(
            layers=layers, model_dim=dim, heads=heads, length=length, vocab=51_200, dropout=True
        )
        found.append(
            Measured(
                table=f"{values[1]:g} GPUs",
                problem=f"{values[0]:g}B",
                shape=shape,
                layout=layout,
                device=A100_VTRAIN,
                code=DEEPSPEED,
                seconds=values[11] / 1e3,
            )
        )
    return found


@dataclass(frozen=True, kw_only=True)
class MeasuredStage:
    """Seconds of a middle stage of a pipeline on one device: no link is in them.

    Attributes:
        part: "TF", "TB" or "TW": forward, gradients of inputs, or gradients of weights.
    """

    shape: TransformerShape
    layout: Layout
    part: str
    seconds: float

    def estimate(self, constants: Constants) -> float:
        """Return the predicted seconds."""
        cost = StepCost(self.shape, self.layout, A100, MEGATRON_2023, constants)
        time = cost.times[1]
        parts = {"TF": time.forward, "TB": time.backward - time.weight, "TW": time.weight}
        return parts[self.part]


def zero_bubble_shape(row: Mapping[str, str]) -> TransformerShape:
    """Return the model of a row of the zero-bubble paper's tables; the vocabulary is assumed."""
    return TransformerShape(
        layers=int(row["layers"]),
        model_dim=int(row["hidden"]),
        heads=int(row["heads"]),
        length=int(row["seq"]),
        vocab=50_304,
        dropout=True,
    )


def a100_stages() -> list[MeasuredStage]:
    """Four models of the zero-bubble paper's table 9: fp16, scores written, nothing recomputed.

    The first and the last stage have a block less than the others.
    """
    found = []
    for row in {row["model"]: row for row in read("zero_bubble_tables_3_4_5_9")}.values():
        p, layers = int(row["stages"]), int(row["layers"])
        some = (layers + 2) // p
        layout = Layout(
            sizes=ParallelSizes(pipeline=p),
            micro_batch=int(row["micro_batch"]),
            microbatches=int(row["microbatches"]),
            blocks=(some - 1, *[some] * (p - 2), some - 1),
        )
        shape = zero_bubble_shape(row)
        found += [
            MeasuredStage(shape=shape, layout=layout, part=part, seconds=float(row[part]) / 1e3)
            for part in ("TF", "TB", "TW")
        ]
    return found


_LLAMA = {
    "7B": (32, 4096, 32, 32, 11_008),
    "13B": (40, 5120, 40, 40, 13_824),
    "8B": (32, 4096, 32, 8, 14_336),
    "70B": (80, 8192, 64, 8, 28_672),
    "405B": (126, 16_384, 128, 8, 53_248),
}
"""Layers, model dim, heads, key/value heads, feed-forward dim: 2307.09288 and 2407.21783."""


def llama_shape(name: str, length: int, vocab: int = 128_256) -> TransformerShape:
    layers, dim, heads, kv_heads, ff_dim = _LLAMA[name]
    return TransformerShape(
        layers=layers,
        model_dim=dim,
        heads=heads,
        kv_heads=kv_heads,
        ff_dim=ff_dim,
        length=length,
        vocab=vocab,
        gated=True,
        tied=False,
    )


def _torchtitan() -> Iterator[Measured]:
    """Under a pipeline torchtitan gathers weights once a step, and sums gradients once."""
    for row in read("torchtitan_h100_202412"):
        piped, batch, length = int(row["pp"]) > 1, int(row["local_batch"]), int(row["seq"])
        technique = row["technique"]
        code = replace(
            TORCHTITAN,
            fp8="fp8" in technique,
            fused_elementwise=0.6 if "compile" in technique or "fp8" in technique else 1.0,
            fused_tensor=0.5 if "async" in technique else 0.0,
        )
        sizes = ParallelSizes(
            pipeline=int(row["pp"]),
            data_shard=int(row["fsdp"]),
            tensor=int(row["tp"]),
            context=int(row["cp"]),
        )
        layout = Layout(
            sizes=sizes,
            micro_batch=1 if piped else batch,
            microbatches=batch if piped else 1,
            zero_stage=1 if piped else 3,
            schedule="interleaved" if "Interleaved" in technique else "1f1b",
            virtual=2,
            recompute="full" if row["ac"] == "full" else "selective",
        )
        yield Measured(
            table=f"torchtitan {row['table']}",
            problem=f"{row['model']} {technique}",
            shape=llama_shape(row["model"], length),
            layout=layout,
            device=H100_500W,
            code=code,
            seconds=layout.samples * length / (float(row["tps_per_gpu"]) * int(row["gpus"])),
        )


def _asynchronous_tensor() -> Iterator[Measured]:
    for row in read("torchtitan_asynctp_202506"):
        if "rowwise" in row["precision"]:
            continue  # scales of rows need kernels of their own: another speed of products
        for kind in ("vanilla", "async"):
            code = replace(
                TORCHTITAN,
                fp8="fp8" in row["precision"],
                fused_elementwise=0.6,
                fused_tensor=0.5 if kind == "async" else 0.0,
            )
            layout = Layout(
                sizes=ParallelSizes(data_shard=int(row["fsdp"]), tensor=int(row["tp"])),
                micro_batch=int(row["local_batch"]),
                zero_stage=3,
                recompute="full" if row["ac"] == "full" else "selective",
            )
            rate = float(row[f"{kind}_tps"]) * int(row["gpus"])
            yield Measured(
                table="torchtitan async",
                problem=f"{row['model']} {row['precision']} {kind}",
                shape=llama_shape(row["model"], 8192),
                layout=layout,
                device=H100_500W,
                code=code,
                seconds=layout.samples * 8192 / rate,
            )


_NEMO = {
    "GPT3-5B": (24, 4096, 32, 32, 16_384, 51_200),
    "GPT3-20B": (44, 6144, 48, 48, 24_576, 51_200),
    "GPT3-175B": (96, 12_288, 96, 96, 49_152, 51_200),
    "Nemotron-8B": (32, 4096, 32, 32, 16_384, 256_000),
    "Nemotron-22B": (40, 6144, 48, 48, 24_576, 256_000),
    "Nemotron-340B": (96, 18_432, 96, 8, 73_728, 256_000),
}
"""As `_LLAMA`, then the vocabulary: the recipes of NeMo 24.07."""


def _nemo() -> Iterator[Measured]:
    for row in read("nemo_24_07_pretraining_fp8"):
        name, length = row["model"], int(row["seq"])
        if name.startswith("LLAMA"):
            vocab = 32_000 if name.startswith("LLAMA2") else 128_256
            shape = llama_shape(name.partition("-")[2], length, vocab)
        else:
            layers, dim, heads, kv_heads, ff_dim, vocab = _NEMO[name]
            shape = TransformerShape(
                layers=layers,
                model_dim=dim,
                heads=heads,
                kv_heads=kv_heads,
                ff_dim=ff_dim,
                length=length,
                vocab=vocab,
                tied=False,
            )
        tensor, pipeline, context, virtual = (int(row[k]) for k in ("tp", "pp", "cp", "vp"))
        data = int(row["gpus"]) // (tensor * pipeline * context)
        layout = Layout(
            sizes=ParallelSizes(pipeline=pipeline, data_shard=data, tensor=tensor, context=context),
            micro_batch=int(row["mbs"]),
            microbatches=int(row["gbs"]) // data // int(row["mbs"]),
            schedule="interleaved" if virtual > 1 else "1f1b",
            virtual=virtual,
        )
        rate = float(row["tokens_s_gpu"]) * int(row["gpus"])
        yield Measured(
            table="NeMo fp8",
            problem=name,
            shape=shape,
            layout=layout,
            device=H100,
            code=TRANSFORMER_ENGINE,
            seconds=layout.samples * length / rate,
        )


def _nemo_long() -> Iterator[Measured]:
    """Micro-batch 1 and no recomputation are assumed."""
    for row in read("nemo_long_sequence_cp"):
        length, context = int(row["seq_k"]) * 1024, int(row["cp"])
        data = int(row["dp"])
        shape = llama_shape("7B", length, 32_000)
        layout = Layout(
            sizes=ParallelSizes(
                pipeline=int(row["pp"]), data_shard=data, tensor=int(row["tp"]), context=context
            ),
            microbatches=int(row["batch"]) // data,
        )
        rate = float(row["tflops_cp"]) * 1e12 * layout.sizes.world_size
        yield Measured(
            table="NeMo long",
            problem=f"{row['seq_k']}k",
            shape=shape,
            layout=layout,
            device=H100,
            code=TRANSFORMER_ENGINE,
            seconds=shape.flops(layout.samples) / rate,
        )


def _megatron_core() -> Iterator[Measured]:
    """Without recomputation; the largest micro-batch up to 4, under a pipeline 1 with the most
    virtual stages up to 6, are assumed.
    """
    for row in read("megatron_core_h100_weak_scaling"):
        layers, pipeline = int(row["layers"]), int(row["pp"])
        count = int(row["global_batch"]) // 48
        fits = [
            v
            for v in range(2, 7)
            if pipeline > 1 and layers % (pipeline * v) == 0 and count % pipeline == 0
        ]
        micro = 1 if pipeline > 1 else max(x for x in (1, 2, 4) if count % x == 0)
        shape = TransformerShape(
            layers=layers,
            model_dim=int(row["hidden"]),
            heads=int(row["heads"]),
            length=4096,
            vocab=131_072,
        )
        layout = Layout(
            sizes=ParallelSizes(pipeline=pipeline, data_shard=48, tensor=int(row["tp"])),
            micro_batch=micro,
            microbatches=count // micro,
            schedule="interleaved" if fits else "1f1b",
            virtual=max(fits, default=1),
        )
        rate = float(row["tflops_per_gpu"]) * 1e12 * int(row["gpus"])
        yield Measured(
            table="Megatron-Core",
            problem=row["model"],
            shape=shape,
            layout=layout,
            device=H100,
            code=MEGATRON_CORE,
            seconds=shape.flops(layout.samples) / rate,
        )


def h100_tables() -> list[Measured]:
    """Return all rows of the tables measured on H100s."""
    readers = (_torchtitan, _asynchronous_tensor, _nemo, _nemo_long, _megatron_core)
    return [row for reader in readers for row in reader()]
