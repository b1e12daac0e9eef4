"""Memory and bytes of divided attention, counted: live bytes at the peak of a forward and backward,
bytes kept between the two, and bytes sent, beside torch's own template.

The unit is M, keys and values of one rank; 256 tokens on every rank, so that the whole grows with
the ranks. Nothing here depends on time.
"""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from _paired import Arguments, launch
from _torch_ring import prepare, torch_ring
from torch import Tensor

from lightning_par.engine.context.apply import build_axis
from lightning_par.engine.context.options import ContextOptions
from lightning_par.mesh import build_mesh
from lightning_par.observe.live_bytes import LiveBytes
from lightning_par.profiling.comm_volume import CommVolume
from lightning_par.sizes import ParallelSizes

TOKENS, HEADS, DIM = 256, 4, 64


def count(attend: Callable[..., Tensor], tokens: int) -> tuple[float, float, float]:
    """Return peak and what is kept, of the rank with most, and the mean of what is sent, in M."""
    leaves = [torch.randn(1, HEADS, tokens, DIM, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, HEADS, tokens, DIM)
    with LiveBytes(besides=[leaves, grad]) as live, CommVolume() as volume:
        out = attend(*leaves)
        kept = live.now
        out.backward(grad)
    unit = 2 * leaves[1].numel() * leaves[1].element_size()
    most = torch.tensor([live.peak, kept]) / unit
    sent = torch.tensor(volume.total().sent) / unit / dist.get_world_size()
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(sent)
    return float(most[0]), float(most[1]), float(sent)


def body(arguments: Arguments) -> None:
    world = dist.get_world_size()
    mesh = build_mesh(ParallelSizes(context=world), "cpu")
    rows = []
    for tokens in (TOKENS, 2 * TOKENS):
        for causal in (True, False):
            for route in ("direct", "ring"):
                axis = build_axis(mesh, ContextOptions(route=route))
                axis.set_length(tokens * world)
                rows.append((f"ours, {route}", causal, tokens, partial(axis.attend, causal=causal)))
        for rotate in ("allgather", "alltoall"):
            template = prepare(rotate, balanced=True)
            if template is not None:
                attend = partial(torch_ring, causal=True, template=template)
                rows.append((f"torch, {rotate}", True, tokens, attend))
    if dist.get_rank() == 0:
        print(f"{world} ranks")
        print("                    mask    tokens/rank  peak M  kept M  sent M")
    for name, causal, tokens, attend in rows:
        if name.startswith("torch"):
            prepare(name.split(", ")[1], balanced=True)
        peak, kept, sent = count(attend, tokens)
        if dist.get_rank() == 0:
            mask = "causal" if causal else "full"
            print(f"{name:18}  {mask:6}  {tokens:11}  {peak:6.2f}  {kept:6.2f}  {sent:6.2f}")


def main() -> None:
    arguments = Arguments(pairs=1, steps=1, warmup=0, profile=False)
    for ranks in (2, 4, 8):
        launch(body, arguments, ranks=ranks)


if __name__ == "__main__":
    main()
