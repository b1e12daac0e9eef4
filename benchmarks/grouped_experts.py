"""Eight experts, 4096 tokens, two experts each: one grouped product against one product per expert.

A step is forward and backward of the experts of one layer; the contenders share the weights and the
routing. With ``--device cuda`` the target is that of the grouped product there.
"""

import argparse
from collections.abc import Callable

import torch
from _paired import add_arguments, Arguments, compare, read_arguments, Turn

from lightning_par.models.mixtral.grouped_linear import GroupedBackend, supports_grouped
from lightning_par.models.mixtral.moe import Experts

TOKENS, EXPERTS, CHOSEN = 4096, 8, 2


def step_of(
    experts: Experts, hidden: torch.Tensor, counts: torch.Tensor, arguments: Arguments
) -> Callable[[Turn], None]:
    """Return a contender."""
    order = torch.randperm(TOKENS * CHOSEN, device=hidden.device) // CHOSEN
    weights = torch.rand(TOKENS * CHOSEN, device=hidden.device, dtype=hidden.dtype)

    def run(turn: Turn) -> None:
        for _ in range(arguments.total_steps):
            turn.next()
            for parameter in experts.parameters():
                parameter.grad = None
            out, _ = experts(hidden, weights, order, counts)
            out.square().mean().backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_arguments(parser)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sizes", type=int, nargs=2, default=[256, 512], metavar=("D", "F"))
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    options = parser.parse_args()
    arguments, device = read_arguments(options), torch.device(options.device)
    model_dim, ff_dim = options.sizes
    if device.type == "cpu":
        torch.set_num_threads(1)
    for name in options.dtypes:
        dtype = getattr(torch, name)
        if not supports_grouped(device.type, dtype):
            print(f"{name}: F.grouped_mm is not supported on {device.type}")
            continue
        torch.manual_seed(0)
        hidden = torch.randn(1, TOKENS, model_dim, device=device, dtype=dtype, requires_grad=True)
        chosen = torch.randint(0, EXPERTS, (TOKENS * CHOSEN,), device=device)
        counts = torch.bincount(chosen, minlength=EXPERTS)
        contenders = {}
        backends: tuple[GroupedBackend, ...] = ("loop", "grouped")
        for backend in backends:
            torch.manual_seed(1)
            experts = Experts(EXPERTS, model_dim, ff_dim, backend).to(device, dtype)
            contenders[backend] = step_of(experts, hidden, counts, arguments)
        compare(
            f"{EXPERTS} experts, {TOKENS} tokens, D {model_dim}, F {ff_dim}, {name}, {device.type}",
            contenders,
            arguments,
            targets={"grouped": 1 / 1.5} if device.type == "cuda" else {},
        )


if __name__ == "__main__":
    main()
