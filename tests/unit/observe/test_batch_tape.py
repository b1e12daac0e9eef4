"""What a step makes of its batch, made again from another one."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.overrides import TorchFunctionMode

from lightning_par.observe.batch_tape import BatchTape, TapedTensor


class _Recorder(TorchFunctionMode):
    def __init__(self, tape: BatchTape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        self._tape.note(function, args, kwargs or {}, result)
        return result


def batch_of(rows: int, length: int) -> dict[str, Tensor]:
    torch.manual_seed(rows)
    y = torch.randint(0, 9, (rows, length))
    return {"y": y, "mask": y > 2, "size": y.sum(1) % length}


def taped(step: Callable[[Any], Tensor], **options: Any) -> TapedTensor | None:
    batch = batch_of(4, 6)
    tape = BatchTape(batch)
    with _Recorder(tape):
        made = step(batch)
    return tape.of(made, **options)


def masked_in_place(batch: Any) -> Tensor:
    made = batch["y"].clone()
    made[:, :3] = -100
    made[~batch["mask"]] = -100
    return made


def by_lengths(batch: Any) -> Tensor:
    places = torch.arange(batch["y"].shape[1], device=batch["y"].device)
    return torch.where(places < batch["size"][:, None], batch["y"], -100)


def through_a_view(batch: Any) -> Tensor:
    made = batch["y"].clone()
    made.view(-1)[batch["mask"].flatten()] = 7
    return made.T


def in_the_batch(batch: Any) -> Tensor:
    batch["y"][batch["mask"]] = -1
    return batch["y"]


def of_all_tokens(batch: Any) -> Tensor:
    return batch["y"].view(batch["y"].shape[0] * batch["y"].shape[1]) * 2


STEPS = [masked_in_place, by_lengths, through_a_view, in_the_batch, of_all_tokens]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("shape", [(4, 6), (2, 6), (3, 9)], ids=str)
def test_a_tensor_is_made_of_another_batch(step: Any, shape: tuple[int, int]) -> None:
    """Of other lengths, too; the batch that it is made of stays as it is."""
    found = taped(step)
    assert found is not None
    # Only the numbers of entries of the last step follow the first dim, too.
    follows_all, follows_some, _ = pickle.loads(pickle.dumps(found.variants()))
    batch, untouched = batch_of(*shape), batch_of(*shape)
    made = (follows_all if step is of_all_tokens else follows_some).make(batch)
    assert torch.equal(made, step(batch_of(*shape)))
    assert all(torch.equal(batch[name], untouched[name]) for name in batch)


def test_a_number_may_follow_no_length() -> None:
    """``[:, :4]`` of four samples is four columns of two samples, in one of the variants."""
    found = taped(lambda batch: batch["y"].clone()[:, :4])
    assert found is not None
    shapes = [tuple(variant.make(batch_of(2, 6)).shape) for variant in found.variants()]
    assert shapes == [(2, 2), (2, 4), (2, 4)]
    assert found.make(batch_of(2, 6)).shape == (2, 4)


def test_a_batch_of_other_tensors_is_told() -> None:
    found = taped(masked_in_place)
    assert found is not None
    assert found.takes(batch_of(3, 9))
    assert not found.takes({**batch_of(3, 9), "more": torch.zeros(3)})
    assert not found.takes({**batch_of(3, 9), "mask": torch.zeros(3, 9)})


def drawn(batch: Any) -> Tensor:
    return batch["y"] * (torch.rand(batch["y"].shape) > 0.5)


def of_a_weight(batch: Any) -> Tensor:
    return batch["y"] * nn.Parameter(torch.ones(1))


def written_by_a_weight(batch: Any) -> Tensor:
    made = batch["y"].float()
    made[0] = nn.Parameter(torch.ones(1)).detach()
    return made


def after_a_value(batch: Any) -> Tensor:
    return batch["y"] + 1 if batch["mask"].any() else batch["y"]


@pytest.mark.parametrize(
    "step", [drawn, of_a_weight, written_by_a_weight, after_a_value], ids=lambda s: s.__name__
)
def test_what_the_batch_alone_does_not_tell_is_not_taped(step: Any) -> None:
    assert taped(step) is None


def test_a_value_that_a_submodule_reads_stays_in_it() -> None:
    """Not where the submodule itself makes the tensor."""

    class Reads(nn.Module):
        def forward(self, batch: Any) -> Tensor:
            return batch["y"] + bool(batch["mask"].any())

    def beside(batch: Any) -> Tensor:
        Reads()(batch)
        return batch["y"] + 1

    assert taped(beside) is not None
    assert taped(Reads()) is None


def test_a_bound_is_left_out_if_that_is_asked() -> None:
    """Parts of which nothing counts weigh 0, and not the bound."""
    count = lambda batch: batch["mask"].sum().clamp(min=1)  # noqa: E731
    batch = {**batch_of(2, 6), "mask": torch.zeros(2, 6, dtype=torch.bool)}
    bounded, free = taped(count), taped(count, is_bounded=False)
    assert bounded is not None
    assert free is not None
    assert (bounded.make(batch), free.make(batch)) == (1, 0)
