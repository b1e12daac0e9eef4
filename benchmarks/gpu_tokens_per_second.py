"""Tokens per second and MFU on one CUDA device, bf16 and torch.compile: `hybrid3d` through the
Trainer against the same GPT in a bare PyTorch loop.

The reference is the loop that one would write by hand, with the whole model compiled. Two more tell
the effects apart: the loop with each block and each layer beside them compiled alone, as the
strategy does, and the same model under Lightning's "auto".
Without a CUDA device there is nothing to measure: one line says so. ``--device cpu --tiny`` runs
the same code in seconds, for its own sake.
"""

import argparse
import itertools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _gpt import loader
from _paired import add_arguments, Arguments, compare, fit, read_arguments, Turn

from lightning_par.models.gpt.config import GPTConfig
from lightning_par.models.gpt.lightning_module import GPTModule, group_parameters
from lightning_par.models.gpt.model import GPT
from lightning_par.strategies import Hybrid3DStrategy

PEAK_FLOPS = {
    "B200": 2250e12,
    "H200": 989.4e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
    "RTX 4090": 165.2e12,
    "A10": 125e12,
    "L4": 121e12,
    "RTX 3090": 71e12,
}
"""Part of a device's name -> dense bf16 FLOP/s by its data sheet; the first match counts."""
LOWEST = 0.98
"""Of the reference's tokens per second."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained.

    Attributes:
        preset: Of `GPTConfig`.
        tokens: T.
        batch_size: Samples of a step.
        device: "cuda" or "cpu".
        compiled: Whether anything is compiled.
    """

    preset: str
    tokens: int
    batch_size: int
    device: str
    compiled: bool

    @property
    def config(self) -> GPTConfig:
        """Sizes of the model."""
        return GPTConfig.preset(self.preset)

    def batches(self) -> Any:
        """Return a loader; the same batches for every contender."""
        return loader(
            self.batch_size,
            tokens=self.tokens,
            vocab=self.config.vocab_size,
            pin=self.device == "cuda",
        )


def compile_parts(model: GPT) -> None:
    """Compile each block, and each layer beside them, alone."""
    beside = (child for child in model.children() if child is not model.blocks)
    for layer in (*model.blocks, *beside):
        layer.forward = torch.compile(layer.forward)


def through_trainer(case: Case, arguments: Arguments, turn: Turn, *, ours: bool) -> None:
    """Train with the strategy, or with Lightning's "auto"."""
    module = GPTModule(case.preset)
    if case.compiled and not ours:
        module.configure_model()
        compile_parts(module.model)
    fit(
        module,
        case.batches(),
        Hybrid3DStrategy(compile_blocks=case.compiled) if ours else "auto",
        turn,
        arguments,
        accelerator=case.device,
        devices=1,
        precision="bf16-mixed",
    )


def bare_loop(case: Case, arguments: Arguments, turn: Turn, *, whole: bool) -> None:
    """Train without Lightning, with the optimizer and the schedule of `GPTModule`."""
    device = torch.device(case.device)
    model = GPT(case.config).to(device)
    groups = group_parameters(model.named_parameters(), weight_decay=0.1)
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95), fused=True)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10))
    forward: Any = model
    if case.compiled and whole:
        forward = torch.compile(model)
    elif case.compiled:
        compile_parts(model)
    batches = itertools.chain.from_iterable(itertools.repeat(case.batches()))
    for _ in range(arguments.total_steps):
        turn.next()
        batch = {k: v.to(device, non_blocking=True) for k, v in next(batches).items()}
        with torch.autocast(case.device, dtype=torch.bfloat16):
            logits = forward(batch["input_ids"])
            loss = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()


def peak_flops(name: str) -> float | None:
    """Return what a device can do at best, None if it is not known.

    Args:
        name: As `torch.cuda.get_device_name` gives it.
    """
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)


def report(case: Case, seconds: dict[str, float]) -> None:
    """Print tokens per second, and MFU where the peak is known.

    Args:
        case: What was trained.
        seconds: Of a step, by contender.
    """
    name = torch.cuda.get_device_name() if case.device == "cuda" else "CPU"
    peak = peak_flops(name)
    of_peak = "peak unknown" if peak is None else f"peak {peak / 1e12:.0f} TFLOP/s dense bf16"
    print(f"{name}, {of_peak}; {case.preset}, B {case.batch_size}, T {case.tokens}")
    for contender, step in seconds.items():
        rate = case.batch_size * case.tokens / step
        mfu = (
            ""
            if peak is None
            else f"  MFU {rate * case.config.flops_per_token(case.tokens) / peak:.3f}"
        )
        print(f"{contender:28}  {rate:12,.0f} tokens/s{mfu}")


def parse_case() -> tuple[Case, Arguments]:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--preset", default="gpt2", help="of GPTConfig")
    parser.add_argument("--tokens", type=int, default=1024, help="T")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model for a dry run")
    parser.add_argument("--no-compile", action="store_true", help="always so on the CPU")
    options = parser.parse_args()
    case = Case(
        preset="tiny" if options.tiny else options.preset,
        tokens=32 if options.tiny else options.tokens,
        batch_size=2 if options.tiny else options.batch_size,
        device=options.device,
        compiled=options.device == "cuda" and not options.no_compile,
    )
    return case, read_arguments(options)


def main() -> None:
    """Measure, or say why not."""
    case, arguments = parse_case()
    if case.device == "cuda" and not torch.cuda.is_available():
        print("skipped: no CUDA device (--device cpu --tiny is a dry run)")
        return
    torch.set_float32_matmul_precision("high")
    seconds = compare(
        "one device, bf16-mixed",
        {
            "bare loop": lambda turn: bare_loop(case, arguments, turn, whole=True),
            "bare loop, compiled by parts": lambda turn: bare_loop(
                case, arguments, turn, whole=False
            ),
            "auto, Trainer": lambda turn: through_trainer(case, arguments, turn, ours=False),
            "hybrid3d, Trainer": lambda turn: through_trainer(case, arguments, turn, ours=True),
        },
        arguments,
        targets={"hybrid3d, Trainer": 1 / LOWEST},
    )
    report(case, seconds)


if __name__ == "__main__":
    main()
