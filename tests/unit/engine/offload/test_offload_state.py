"""The states of a host optimizer, walked through every kind of step, and what is held in each."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, Tensor

from lightning_par.engine.offload.cpu_kernels import choose_kernel
from lightning_par.engine.offload.host_optimizer import HostOptimizer
from lightning_par.engine.offload.offload_state import NEXT_STATES, OffloadState
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.engine.offload.update_worker import UpdateWorker

S = OffloadState


class Walk:
    """One weight of ones, its optimizer on the host, and the states in which it was found."""

    def __init__(self, **options: Any) -> None:
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.optimizer = torch.optim.AdamW([self.weight], lr=0.1, weight_decay=0.0)
        self.host = HostOptimizer(
            self.optimizer,
            device=torch.device("cpu"),
            options=OffloadOptions(**options),
            worker=UpdateWorker(choose_kernel("torch", Path()), 1),
        )
        self.seen = [self.host.state]
        self.weight.register_post_accumulate_grad_hook(lambda _: self.see())

    def see(self) -> None:
        if self.host.state is not self.seen[-1]:
            self.seen.append(self.host.state)

    def backward(self, step: int, *, streams: bool = False, factor: float = 1.0) -> None:
        self.host.begin(step, streams=streams, largest=float("inf"))
        self.see()
        (factor * self.weight).sum().backward()
        self.host.finish()
        self.see()
        assert self.weight.grad is None

    def step(self) -> None:
        self.optimizer.step()
        self.see()

    def taken(self) -> list[OffloadState]:
        """Give the states since the last call, without the one at which it began."""
        seen, self.seen = self.seen[1:], self.seen[-1:]
        return seen

    @property
    def first(self) -> float:
        return float(self.weight.detach()[0])


@pytest.fixture
def walk() -> Any:
    made: list[Walk] = []

    def make(**options: Any) -> Walk:
        made.append(Walk(**options))
        return made[-1]

    yield make
    for one in made:
        one.host.close()


def test_plain_step_collects_and_updates_when_the_optimizer_steps(walk: Any) -> None:
    one = walk()
    one.backward(0)
    assert {p: g.tolist() for p, g in one.host.gradients().items()} == {one.weight: [1.0] * 3}
    assert one.first == 1.0
    one.step()
    assert one.taken() == [S.COLLECTING, S.COLLECTED, S.IDLE]
    assert one.first == pytest.approx(0.9)


def test_streamed_step_submits_in_the_backward_and_publishes_after_it(walk: Any) -> None:
    one = walk(bucket_size_mb=1e-6)
    one.backward(0, streams=True)
    assert one.host.early_updates == 1
    assert one.host.gradients() == {}
    assert one.first == 1.0
    one.step()
    assert one.taken() == [S.STREAMING, S.SUBMITTED, S.IDLE]
    assert one.first == pytest.approx(0.9)


@pytest.mark.parametrize("streams", [False, True])
def test_updates_do_not_stream_without_overlap(streams: bool, walk: Any) -> None:
    one = walk(overlap="off", bucket_size_mb=1e-6)
    one.backward(0, streams=streams)
    one.step()
    assert one.taken() == [S.COLLECTING, S.COLLECTED, S.IDLE]
    assert one.host.early_updates == 0


def test_accumulated_step_sums_on_the_host(walk: Any) -> None:
    one = walk(accumulate_on="host")
    for factor in (1.0, 2.0):
        assert one.host.has_unfinished_gradients == (factor == 2.0)
        with one.host.accumulating():
            one.see()
            one.backward(0, factor=factor)
        assert one.host.gradients() == {}
    assert one.taken() == [S.ACCUMULATING, S.PARTIAL, S.ACCUMULATING, S.PARTIAL]
    one.backward(0, streams=True, factor=4.0)
    assert one.host.gradients()[one.weight].tolist() == [7.0] * 3
    assert not one.host.has_unfinished_gradients
    one.step()
    assert one.taken() == [S.COMPLETING, S.COLLECTED, S.IDLE]
    one.backward(1)
    assert one.host.gradients()[one.weight].tolist() == [1.0] * 3  # sums begin anew


def test_delayed_update_is_published_by_the_next_backward(walk: Any) -> None:
    one = walk(delayed_update=1)
    one.backward(0)
    one.step()
    one.backward(1)
    one.step()
    assert one.taken() == [S.COLLECTING, S.COLLECTED, S.IDLE, S.COLLECTING, S.COLLECTED, S.DELAYED]
    assert one.first == pytest.approx(0.9)
    one.backward(2, streams=True)  # cannot stream: the update before it is not published
    assert one.first == pytest.approx(0.8)
    one.step()
    assert one.taken() == [S.COLLECTING, S.COLLECTED, S.DELAYED]
    assert one.first == pytest.approx(0.8)
    one.host.flush()
    one.see()
    assert one.taken() == [S.IDLE]
    assert one.first == pytest.approx(0.7)


def test_optimizer_that_steps_without_a_backward_leaves_a_delayed_update_alone(walk: Any) -> None:
    one = walk(delayed_update=0)
    one.backward(0)
    one.step()
    one.taken()
    one.step()
    assert one.taken() == []
    assert one.first == 1.0


@pytest.mark.parametrize("drops", [True, False], ids=["dropped", "never stepped"])
def test_skipped_step_changes_nothing(drops: bool, walk: Any) -> None:
    """A loss scaler does not step the optimizer at all; `drop` is for on_nonfinite="skip"."""
    one = walk()
    one.backward(0, factor=float("nan"))
    if drops:
        one.host.drop()
        one.see()
        assert one.taken() == [S.COLLECTING, S.COLLECTED, S.IDLE]
        one.step()
        assert one.taken() == []
    else:
        assert one.taken() == [S.COLLECTING, S.COLLECTED]
    assert one.first == 1.0
    one.backward(0)
    one.step()
    assert one.taken()[-1] is S.IDLE
    assert one.first == pytest.approx(0.9)


@pytest.mark.parametrize("delayed", [False, True])
def test_batch_without_a_loss_leaves_the_state_as_it_was(delayed: bool, walk: Any) -> None:
    one = walk(accumulate_on="host", **({"delayed_update": 0} if delayed else {}))
    one.backward(0)
    one.step()
    before = one.taken()[-1]
    assert before is (S.DELAYED if delayed else S.IDLE)
    with one.host.accumulating():
        pass
    assert one.host.state is before
    with one.host.accumulating():
        one.backward(1)
    with one.host.accumulating():
        pass
    assert one.host.state is S.PARTIAL


class Fails(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ValueError("broken")


@pytest.mark.parametrize("streams", [False, True])
def test_failed_backward_is_forgotten_by_the_next_step(streams: bool, walk: Any) -> None:
    """The weight's own gradient is computed before the error; a streamed update of it counts."""
    one = walk(bucket_size_mb=1e-6)
    other = nn.Parameter(torch.ones(3, dtype=torch.float64))
    one.host.begin(0, streams=streams, largest=float("inf"))
    with pytest.raises(ValueError, match="broken"):
        (one.weight * Fails.apply(other)).sum().backward()
    assert one.host.state is (S.STREAMING if streams else S.COLLECTING)
    assert one.host.early_updates == streams
    one.backward(0)
    one.step()
    assert one.host.state is S.IDLE
    assert one.first == pytest.approx(0.8 if streams else 0.9)


def test_failed_update_is_forgotten_by_the_next_step(walk: Any) -> None:
    one = walk()
    kernel = one.host._worker.kernel

    class Broken:
        name, is_parallel = kernel.name, True

        def __call__(self, *_: Any, **__: Any) -> None:
            raise ValueError("broken")

    one.host._worker.kernel = Broken()
    one.backward(0)
    with pytest.raises(ValueError, match="broken"):
        one.step()
    assert one.host.state is S.IDLE
    one.host._worker.kernel = kernel
    one.backward(1)
    one.step()
    assert one.first < 1.0


def test_every_other_transition_is_refused(walk: Any) -> None:
    host = walk().host
    assert set(NEXT_STATES) == set(S)
    for before in S:
        for after in S:
            host.state = before
            if after is S.IDLE or after in NEXT_STATES[before]:
                host._enter(after)
                assert host.state is after
            else:
                with pytest.raises(AssertionError):
                    host._enter(after)
    host.state = S.IDLE
    with pytest.raises(AssertionError):
        host.finish()  # without `begin`


def test_docstring_tells_every_state() -> None:
    assert S.__doc__ is not None
    for state in S:
        assert f"- ``{state.name}``: " in S.__doc__
