"""The optimizer on the host of one CUDA device: step time against FSDP2's own offloading, peak
memory, copies that run beside kernels, and the largest GPT that trains.

FSDP2's `CPUOffloadPolicy` keeps float32 parameters on the host, computes in bfloat16, and steps
with torch's fused AdamW there. Without a CUDA device there is nothing to measure: one line says so.
``--device cpu --tiny`` runs the same code in seconds, for its own sake.
"""

import argparse
import itertools
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _gpt import BenchModule, CONFIG, loader
from _paired import add_arguments, Arguments, compare, fit, read_arguments, Turn
from _trace import trace_device
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard, MixedPrecisionPolicy

from lightning_par import Hybrid3DStrategy, LightningParError, ZeROOffloadStrategy
from lightning_par.models.gpt.config import GPTConfig
from lightning_par.models.gpt.model import GPT

STRATEGIES: Mapping[str, Callable[[], Any]] = {
    "zero_offload": ZeROOffloadStrategy,
    "streamed": partial(ZeROOffloadStrategy, on_nonfinite="ignore"),
    "delayed": partial(ZeROOffloadStrategy, delayed_update=0),
}
LARGEST = 1 / 1.5
"""Of the step time of FSDP2."""


class _Alone(Turn):
    """A turn that is not measured."""

    def __init__(self) -> None:
        """There is nobody to wait for."""

    def next(self) -> None:
        """Go on."""


def of_fsdp(case: GPTConfig, batch: int, device: str, arguments: Arguments, turn: Turn) -> None:
    """Train with FSDP2 and its policy."""
    mesh = init_device_mesh(device, (1,))
    model = GPT(case)
    policies: dict[str, Any] = {
        "mesh": mesh,
        "offload_policy": CPUOffloadPolicy(pin_memory=device == "cuda"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    }
    for block in model.blocks:
        fully_shard(block, **policies)
    fully_shard(model, **policies)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = itertools.cycle(loader(batch, vocab=case.vocab_size, pin=device == "cuda"))
    for _ in range(arguments.total_steps):
        turn.next()
        data = {k: v.to(device, non_blocking=True) for k, v in next(batches).items()}
        logits = model(data["input_ids"])
        loss = F.cross_entropy(logits.float().flatten(0, 1), data["labels"].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def through_trainer(
    make: Callable[[], Any],
    case: GPTConfig,
    batch: int,
    device: str,
    arguments: Arguments,
    turn: Turn,
) -> None:
    """Train with a strategy: offloaded in bfloat16 with float32 masters on the host, otherwise with
    float32 weights and autocast.
    """
    batches = loader(batch, vocab=case.vocab_size, pin=device == "cuda")
    precision = "bf16-mixed" if make is Hybrid3DStrategy else "bf16-true"
    more = {"accelerator": device, "devices": 1, "precision": precision}
    fit(BenchModule(case), batches, make(), turn, arguments, limit_val_batches=0, **more)


def peak(run: Callable[[Turn], None]) -> float:
    """Return the GiB that were allocated on the device at most; 0 on the CPU."""
    if not torch.cuda.is_available():
        run(_Alone())
        return 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run(_Alone())
    return torch.cuda.max_memory_allocated() / 2**30


def copies_beside_kernels(run: Callable[[Turn], None]) -> str:
    """Return how much of the copies between host and device ran while a kernel did."""
    found = trace_device(lambda: run(_Alone()))
    return "not seen: this torch records no CUDA device" if found is None else str(found)


def sizes(case: GPTConfig) -> Iterator[GPTConfig]:
    """Give deeper and deeper networks."""
    for factor in itertools.count(1):
        yield replace(case, num_layers=case.num_layers * factor)


def largest(make: Callable[[], Any], case: GPTConfig, batch: int, device: str, most: int) -> str:
    """Return the parameters of the deepest network that takes two steps."""
    arguments = Arguments(pairs=1, steps=1, warmup=0, profile=False)
    found = "none"
    for config in itertools.islice(sizes(case), most):
        try:
            through_trainer(make, config, batch, device, arguments, _Alone())
        except (torch.OutOfMemoryError, LightningParError) as error:
            return f"{found}; then {type(error).__name__}"
        with torch.device("meta"):
            count = sum(p.numel() for p in GPT(config).parameters())
        found = f"{count / 1e9:.3f} billion"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="the GPT of the other benchmarks")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--most", type=int, default=64, help="steps of depth for the largest")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device: nothing is measured")
        return
    case = CONFIG if options.tiny else GPTConfig.preset("gpt2-xl")
    arguments = read_arguments(options)
    with tempfile.NamedTemporaryFile() as store:
        backend = "cpu:gloo,cuda:nccl" if options.device == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.FileStore(store.name, 1), rank=0, world_size=1)
        given: dict[str, Any] = {"case": case, "batch": options.batch, "device": options.device}
        runs: dict[str, Any] = {"FSDP2, CPUOffloadPolicy": partial(of_fsdp, **given)}
        runs |= {n: partial(through_trainer, make, **given) for n, make in STRATEGIES.items()}
        compare(
            f"the optimizer on the host of one {options.device} device",
            {name: partial(_turned, run, arguments) for name, run in runs.items()},
            arguments,
            targets={"zero_offload": LARGEST},
        )
        short = Arguments(pairs=1, steps=2, warmup=1, profile=False)
        runs["on the device"] = partial(through_trainer, Hybrid3DStrategy, **given)
        for name, run in runs.items():
            alone = partial(_turned, run, short)
            print(f"{name:<26}{peak(alone):8.2f} GiB at most; ", end="")
            print(copies_beside_kernels(alone), flush=True)
        for name, make in {"on the device": Hybrid3DStrategy, **STRATEGIES}.items():
            deepest = largest(make, case, options.batch, options.device, options.most)
            print(f"{name:<26}largest that trains: {deepest} parameters", flush=True)
        dist.destroy_process_group()


def _turned(run: Callable[..., None], arguments: Arguments, turn: Turn) -> None:
    run(arguments=arguments, turn=turn)


if __name__ == "__main__":
    main()
