"""`capture` and `compare`: loops of plain torch and of Fabric against one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module, RowwiseParallel
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from lightning_par import capture, compare
from lightning_par.observe.whole_tensors import whole_tensors
from tests.support.models.plain_language_model import NormalizedNet, PlainNet, token_pairs
from tests.support.ranks.api import ranks

pytestmark = pytest.mark.timeout(300)


class Net(PlainNet):
    """Drops at the end."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


def batch_of(rank: int, ignored: int = 0) -> tuple[Tensor, Tensor]:
    torch.manual_seed(7 + rank)
    x, y = (torch.stack(each) for each in zip(*token_pairs(4), strict=True))
    return x, y.index_fill(1, torch.arange(ignored * rank), -100)


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    return loss


def by_ddp(net: nn.Module) -> nn.Module:
    return DistributedDataParallel(net)


def by_fsdp(net: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)


def by_fully_shard(net: nn.Module) -> nn.Module:
    return fully_shard(net, mesh=init_device_mesh("cpu", (2,)))


def by_tensor_parallelism(net: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in net.blocks:
        parallelize_module(block.mlp, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net


WRAPPERS = {
    "DDP": by_ddp,
    "FSDP": by_fsdp,
    "fully_shard": by_fully_shard,
    "tensor": by_tensor_parallelism,
}


@ranks(2)
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_healthy_loop_is_equal_and_left_as_it_is(rank: int, world: int, name: str) -> None:
    replica = 0 if name == "tensor" else rank
    found = []
    for proves in (False, True):
        torch.manual_seed(0)
        net = Net()
        captured = capture(net)
        model = WRAPPERS[name](net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batch = batch_of(replica)
        torch.manual_seed(replica)
        losses = []
        for _ in range(3):
            if proves:
                report = compare(captured, model, batch, step, replica=replica)
                assert report.equal, str(report)
            optimizer.zero_grad()
            losses.append(float(step(model, batch)))
            optimizer.step()
        found.append((losses, whole_tensors(net, within=model), torch.rand(1).item()))
    one, other = found
    assert one[0] == other[0]
    assert one[2] == other[2]
    assert all(torch.equal(one[1][key], other[1][key]) for key in one[1])


@ranks(2)
def test_a_loop_that_forgets_to_reduce_is_told(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = PlainNet()
    captured = capture(net)
    model = DistributedDataParallel(net)

    def forgets(model: Any, batch: Any) -> Tensor:
        if not isinstance(model, DistributedDataParallel):
            return step(model, batch)
        with model.no_sync():
            return step(model, batch)

    report = compare(captured, model, batch_of(rank), forgets)
    assert report.difference is not None
    assert report.difference.kind == "gradient"
    (cause,) = report.causes
    assert cause.startswith("a missing all-reduce: gradients differ between ranks (emb.weight")
    assert "the gradient of rank 0 is that of its own samples" in cause
    assert compare(captured, model, batch_of(rank), step).equal


@ranks(2)
def test_batchnorm_is_told(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = NormalizedNet()
    captured = capture(net)
    report = compare(captured, DistributedDataParallel(net), batch_of(rank), step)
    (cause,) = report.causes
    assert cause.startswith("BatchNorm: statistics normalizes over the samples of one rank")


@ranks(2)
def test_unequal_labels_are_told_and_the_advice_makes_them_equal(rank: int, world: int) -> None:
    def divided_by_the_mean(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        count = (y != -100).sum().float()
        dist.all_reduce(count)
        total = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum")
        loss = total / (count / dist.get_world_size())
        loss.backward()
        return loss

    torch.manual_seed(0)
    net = PlainNet()
    captured = capture(net)
    model, batch = DistributedDataParallel(net), batch_of(rank, ignored=5)
    (cause,) = compare(captured, model, batch, step).causes
    assert cause.startswith("a mean of means: the ranks have 48, 28 labels")
    report = compare(captured, model, batch, divided_by_the_mean)
    assert report.equal, str(report)


@ranks(2)
def test_a_loop_of_fabric_is_equal(rank: int, world: int) -> None:
    fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    net = PlainNet()
    captured = capture(net)
    model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))

    def by_fabric(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        fabric.backward(loss)
        return loss

    report = compare(captured, model, batch_of(rank), by_fabric)
    assert report.equal, str(report)


class Halves(nn.Module):
    """Half of a linear layer by hand: plain tensors of which nobody knows that they are parts."""

    def __init__(self, whole: nn.Linear, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(whole.weight.detach().chunk(2)[rank].clone())
        self.forgets_the_others = False

    def forward(self, x: Tensor) -> Tensor:
        own = x @ self.weight.T
        parts = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(parts, own.detach())
        parts[dist.get_rank()] = own
        return torch.cat(parts, -1)


def whole_halves(model: Halves) -> Any:
    def whole(what: str) -> dict[str, Tensor]:
        tensor = model.weight.grad if what == "gradients" else model.weight.detach()
        if tensor is None:
            return {}
        parts = [torch.empty_like(tensor) for _ in range(2)]
        dist.all_gather(parts, tensor)
        return {"weight": torch.cat(parts)}

    return whole


def square(model: nn.Module, batch: Tensor) -> Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    return loss


def sgd(clips: Any) -> Any:
    """Return an update that clips by the norm that a function finds."""

    @torch.no_grad()
    def update(model: Any) -> None:
        (weight,) = model.parameters()
        weight.grad.mul_(0.1 / clips(model))
        weight.sub_(weight.grad)

    return update


def norm_of_all(model: Any) -> Tensor:
    square = model.weight.grad.square().sum()
    if isinstance(model, Halves):
        dist.all_reduce(square)
    return square.sqrt()


@ranks(2)
def test_shards_by_hand_are_compared_with_their_update(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = nn.Linear(5, 4, bias=False)
    captured, model = capture(net), Halves(net, rank)
    batch, before = torch.randn(3, 5), model.weight.detach().clone()
    given: Any = {"replica": 0, "whole": whole_halves(model)}

    report = compare(captured, model, batch, square, update=sgd(norm_of_all), fresh=True, **given)
    assert report.equal, str(report)
    assert torch.equal(model.weight, before)

    own_norm = sgd(lambda model: model.weight.grad.norm())
    report = compare(captured, model, batch, square, update=own_norm, **given)
    assert report.difference is not None
    assert report.difference.kind == "handed"
    assert report.causes[0].startswith("clipping by the norm of a shard")

    late = sgd(lambda model: norm_of_all(model) * (2 if isinstance(model, Halves) else 1))
    report = compare(captured, model, batch, square, update=late, **given)
    assert report.difference is not None
    assert report.difference.factor == pytest.approx(0.5)


@ranks(2)
def test_weights_that_are_not_those_captured_are_told(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = nn.Linear(5, 4, bias=False)
    captured, model = capture(net), Halves(net, 1 - rank)
    batch, whole = torch.randn(3, 5), whole_halves(model)
    report = compare(captured, model, batch, square, replica=0, whole=whole, fresh=True)
    assert report.difference is not None
    assert report.difference.kind == "start"
    assert "the weight of weight before the step has the norm" in str(report)
    assert report.causes[0].startswith("wrong weights at the start of the step")


@ranks(2)
def test_an_evaluation_is_compared_by_what_it_returns(rank: int, world: int) -> None:
    def repeats(model: nn.Module, batch: Tensor) -> Tensor:
        count = dist.get_world_size()
        padded = torch.cat([batch, batch[: -len(batch) % count]])  # as DistributedSampler does
        return model(padded[dist.get_rank() :: count]).detach().mean()

    def adds_up(model: nn.Module, batch: Tensor) -> Tensor:
        total = model(batch[dist.get_rank() :: dist.get_world_size()]).detach().sum()
        dist.all_reduce(total)
        return total / len(batch)

    torch.manual_seed(0)
    net, batch = nn.Linear(5, 1), torch.randn(3, 5)
    captured = capture(net)
    report = compare(captured, net, batch, repeats, replica=0)
    assert report.difference is not None
    assert report.difference.kind == "loss"
    report = compare(captured, net, batch, adds_up, replica=0)
    assert report.equal
    assert report.notes == ("the step computes no gradients, so only its result is compared",)


def test_one_process_is_equal() -> None:
    net = PlainNet()
    report = compare(capture(net), net, batch_of(0), step)
    assert str(report) == "the first step of PlainNet on 1 rank equals that of one process."
