"""What a watcher sees of a step, and that nothing of the step or of the watch is left behind."""

import random

import torch
from torch import nn, Tensor
from torch.nn import functional as F

from lightning_par.observe import FunctionCall, isolated, ModuleCall, OperatorCall, watch, Watcher


class Notes(Watcher):
    def __init__(self) -> None:
        self.functions: list[tuple[str, tuple[str, ...], int]] = []
        self.operators: list[str] = []
        self.modules: list[tuple[str, bool]] = []

    def on_function(self, call: FunctionCall) -> None:
        self.functions.append((call.name, call.modules, len(call.written)))

    def on_operator(self, call: OperatorCall) -> None:
        self.operators.append(str(call.operator))

    def before_module(self, call: ModuleCall) -> None:
        self.modules.append((call.fqn, False))

    def on_module(self, call: ModuleCall) -> None:
        self.modules.append((call.fqn, isinstance(call.output, Tensor)))


class Gate(nn.Module):
    """Writes to a tensor, draws, counts, and keeps what it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        self.register_buffer("steps", torch.zeros(()))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.steps += 1
        self.seen.append(random.random())
        hidden = self.inner(x) + torch.rand(3)
        return F.softmax(hidden.add_(1), dim=-1)


def test_a_watcher_sees_functions_operators_and_modules() -> None:
    model, notes = nn.Sequential(Gate()), Notes()
    with watch(model, notes) as same:
        same(torch.ones(2, 3)).sum().backward()
    assert notes.modules == [
        ("", False), ("0", False), ("0.inner", False), ("0.inner", True), ("0", True), ("", True)
    ]  # fmt: skip
    assert ("linear", ("", "0", "0.inner"), 0) in notes.functions
    assert ("add_", ("", "0"), 1) in notes.functions
    assert ("softmax", ("", "0"), 0) in notes.functions
    assert notes.functions.index(("add_", ("", "0"), 1)) < len(notes.functions)
    assert "aten._softmax.default" in notes.operators
    assert "aten._softmax_backward_data.default" in notes.operators  # of the backward
    before = len(notes.functions), len(notes.operators), len(notes.modules)
    model(torch.ones(2, 3))
    assert before == (len(notes.functions), len(notes.operators), len(notes.modules))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_functions_are_seen_in_inference_mode() -> None:
    """There torch does not count what writes to a tensor."""
    model, notes = nn.Sequential(Gate()), Notes()
    with torch.inference_mode(), watch(model, notes):
        model(torch.ones(2, 3))
    assert ("softmax", ("", "0"), 0) in notes.functions
    # A tensor of before is counted; of one made inside nobody knows.
    assert ("add_", ("", "0"), 0) in notes.functions
    assert ("add_", ("", "0"), 1) in notes.functions


def test_a_watch_ends_with_an_error_of_the_step() -> None:
    model, notes = nn.Sequential(nn.Linear(3, 3)), Notes()
    try:
        with watch(model, notes):
            model(torch.ones(2, 4))
    except RuntimeError:
        pass
    seen = len(notes.functions)
    model(torch.ones(2, 3))
    assert len(notes.functions) == seen
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_step_that_runs_isolated_leaves_nothing_behind() -> None:
    gate = Gate()
    gate.inner.weight.grad = torch.full((3, 3), 7.0)
    torch.manual_seed(3)
    random.seed(3)
    wanted = torch.rand(2), random.random()
    torch.manual_seed(3)
    random.seed(3)
    with isolated(gate):
        assert gate.inner.weight.grad is None
        gate(torch.ones(2, 3)).sum().backward()
        with torch.no_grad():
            gate.inner.bias.add_(5.0)
        gate.extra = "left"
    assert torch.equal(torch.rand(2), wanted[0])
    assert random.random() == wanted[1]
    assert gate.inner.weight.grad is not None
    assert torch.equal(gate.inner.weight.grad, torch.full((3, 3), 7.0))
    assert gate.inner.bias.grad is None
    assert float(gate.inner.bias.detach().abs().max()) < 1
    assert int(gate.steps) == 0
    assert gate.seen == []
    assert not hasattr(gate, "extra")
