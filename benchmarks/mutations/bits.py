"""Faults of machines: bits that flip in a weight, a gradient, an activation, a state, a message."""

from typing import Any

import torch
from torch import nn, Tensor

from benchmarks.mutations.data import GATHER, swap_collective
from benchmarks.mutations.fault import fault, Switch
from benchmarks.mutations.layouts import CP, DDP, OFFLOAD, PP, TP, ZERO1, ZERO3
from lightning_par.dtensor import local_part

MACHINE = {"kind": "machine", "rank": 1}
ONCE: dict[str, Any] = {**MACHINE, "when": "once"}
BETWEEN: dict[str, Any] = {**MACHINE, "when": "between"}


def _flip(x: Tensor, bit: int = 26) -> None:
    """Flip a bit of one entry; 0 is the lowest bit. By default the largest entry whose exponent
    grows by 8, so that it becomes 256 times as large.
    """
    flat = x.detach().view(-1)
    bits = flat.view(torch.int32)
    grows = (bits >> bit) & 1 == 0
    place = int(torch.where(grows, flat.abs(), -1).argmax())
    bits[place] ^= 1 << bit


def _before_update(switch: Switch, flip: Any) -> None:
    """Call a function with the parameters of this rank, with their gradients, before an update."""
    from lightning_par.strategies.step.gradient_path import GradientPath

    def flips(healthy: Any) -> Any:
        def before(self: Any, parameters: Any) -> None:
            healthy(self, parameters)
            flip([p for p in parameters if p.grad is not None])

        return before

    switch.swap((GradientPath, "before_step"), flips)


@fault("a bit of a weight's exponent flips", DDP, BETWEEN)
@fault("a bit of a weight's exponent flips", TP, BETWEEN)
@fault("a bit of a weight's exponent flips", PP, BETWEEN)
@fault("a bit of a weight's exponent flips", ZERO3, BETWEEN)
@fault("a bit of a weight's exponent flips", CP, BETWEEN)
def _(switch: Switch) -> None:
    _before_update(switch, lambda held: _flip(local_part(held[0])))


@fault("the lowest bit of a norm's weight flips", DDP, BETWEEN)
@fault("the lowest bit of a norm's weight flips", TP, BETWEEN)
@fault("the lowest bit of a norm's weight flips", CP, BETWEEN)
def _(switch: Switch) -> None:
    vectors = lambda held: (local_part(p) for p in held if p.dim() == 1)  # noqa: E731
    _before_update(switch, lambda held: _flip(next(vectors(held)), bit=0))


@fault("a bit of an activation flips in the forward", TP, ONCE, BETWEEN)
@fault("a bit of an activation flips in the forward", DDP, ONCE)
@fault("a bit of an activation flips in the forward", ZERO3, ONCE)
@fault("a bit of an activation flips in the forward", PP, ONCE)
@fault("a bit of an activation flips in the forward", CP, ONCE)
def _(switch: Switch) -> None:
    def watch(_: Any, module: Any) -> None:
        blocks = [m for n, m in module.named_modules() if n.endswith("mlp")]

        def flip(block: nn.Module, args: Any, output: Any) -> None:
            if block.training and switch.acts():
                _flip(output)

        blocks[-1].register_forward_hook(flip)

    switch.at_start(watch)


@fault("a bit of a gradient flips before it is reduced", ZERO3, ONCE, BETWEEN)
@fault("a bit of a gradient flips before it is reduced", DDP, ONCE)
@fault("a bit of a gradient flips before it is reduced", TP, ONCE)
@fault("a bit of a gradient flips before it is reduced", PP, ONCE)
def _(switch: Switch) -> None:
    def watch(_: Any, module: Any) -> None:
        blocks = [m for n, m in module.named_modules() if n.endswith("mlp")]

        def flip(block: nn.Module, args: Any, output: Any) -> None:
            def flipped(grad: Tensor) -> Tensor:
                if switch.acts():
                    grad = grad.clone()
                    _flip(grad)
                return grad

            if block.training and output.requires_grad:
                output.register_hook(flipped)

        blocks[-1].register_forward_hook(flip)

    switch.at_start(watch)


@fault("a bit of a reduced gradient flips", DDP, ONCE)
@fault("a bit of a reduced gradient flips", ZERO3, ONCE)
@fault("a bit of a reduced gradient flips", DDP, BETWEEN)
def _(switch: Switch) -> None:
    _before_update(switch, lambda held: _flip(local_part(held[0].grad)))


@fault("a bit of an optimizer's state flips", DDP, BETWEEN)
@fault("a bit of an optimizer's state flips", ZERO1, BETWEEN)
def _(switch: Switch) -> None:
    def flip(trainer: Any, _: Any) -> None:
        states = trainer.optimizers[0].state.values()
        state = next(s for s in states if "exp_avg" in s and s["exp_avg"].dim())
        _flip(local_part(state["exp_avg"]))

    switch.after_batch(flip)


@fault("a bit of a message with activations flips", PP, {**ONCE, "rank": 0})
def _(switch: Switch) -> None:
    from lightning_par.engine.pipeline.p2p import Channel

    def flips(healthy: Any) -> Any:
        def send(self: Any, tensors: Any) -> None:
            sent = [t.clone() for t in tensors]
            _flip(next(t for t in sent if t.is_floating_point()))
            healthy(self, sent)

        return send

    switch.swap((Channel, "send_tensors"), flips)


@fault("a bit of a weight that arrives flips", ZERO3, ONCE)
def _(switch: Switch) -> None:
    def flips(healthy: Any, output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        work = healthy(output, given, *args, **kwargs)
        if work is not None:
            work.wait()
        _flip(output)
        return work

    swap_collective(switch, GATHER, flips)


@fault("a bit of a master weight on the host flips", OFFLOAD, BETWEEN)
def _(switch: Switch) -> None:
    from lightning_par.engine.offload.update_worker import UpdateWorker

    def flips(healthy: Any) -> Any:
        def run(self: Any, update: Any, *args: Any) -> None:
            _flip(update.tensors.master)
            healthy(self, update, *args)

        return run

    switch.swap((UpdateWorker, "_run_update"), flips)
