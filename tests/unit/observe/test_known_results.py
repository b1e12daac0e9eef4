"""What is known of an operation is what it would give: layout, memory of its own or not, dtype."""

import pytest
import torch
import torch.nn.functional as F

from lightning_par.observe.known_results import KnownResults
from lightning_par.observe.live_bytes import ACTIVATIONS
from lightning_par.observe.weightless import WeightlessTensors
from lightning_par.upstream.tensor import storage_key

OPERATIONS = {
    "new": lambda x: x @ x.T,
    "view": lambda x: x.t()[3:7],
    "several views": lambda x: x.split(30),
    "in place": lambda x: x.add_(1),
    "in place on a view": lambda x: x[5].mul_(2),
    "another dtype": lambda x: x.to(torch.bfloat16),
    "with a real tensor": lambda x: x + torch.arange(90),
    "several new": lambda x: torch.var_mean(x, dim=0),
    "nothing in place of a result": lambda x: F.layer_norm(x, (90,)),
    "a changed layout": lambda x: x.clone().t_(),
}


def seen(x, out):
    """Say what a result is: layout, dtype, device, and whose memory."""
    leaves = out if isinstance(out, tuple | list) else [out]
    return [
        (
            *(t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t is x),
            storage_key(t.untyped_storage()) == storage_key(x.untyped_storage()),
            t.untyped_storage().nbytes(),
        )
        for t in leaves
    ]


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_known_is_what_is_computed(name, monkeypatch):
    operation = OPERATIONS[name]
    with WeightlessTensors() as live:
        x = torch.empty(100, 90)
        first = seen(x, operation(x))
        assert live.now == 4 * 100 * 90
        computed = []
        compute = WeightlessTensors._compute_shapes
        monkeypatch.setattr(
            WeightlessTensors,
            "_compute_shapes",
            lambda self, func, *more: computed.append(func) or compute(self, func, *more),
        )
        y = torch.empty(100, 90)
        again = operation(y)
        assert seen(y, again) == first
        expected = [torch.ops.aten.t_.default] if name == "a changed layout" else []
        assert computed == expected
        del again, y
        assert live.kinds_now == {ACTIVATIONS: 4 * 100 * 90}


def test_two_tensors_are_not_taken_for_one():
    with WeightlessTensors():
        x, y = torch.empty(5000), torch.empty(5000)
        assert torch.add(x, x, out=x) is x
        assert torch.add(y, x, out=x) is x
        assert torch.add(y, x, out=y) is y


def test_numbers_that_are_equal_and_of_other_types_give_other_results():
    with WeightlessTensors():
        x = torch.empty(5000, dtype=torch.int32)
        assert (x * 2).dtype == torch.int32
        assert (x * 2.0).dtype == torch.float32
        assert (x * True).dtype == torch.int32


def test_an_argument_that_nobody_can_compare_is_computed():
    known = KnownResults(None, torch.Tensor)
    results = [known.of("op", (torch.Generator(),), {}, lambda n=n: n) for n in (1, 2)]
    assert results == [1, 2]
