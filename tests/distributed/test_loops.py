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
    assert "that of rank 0 is of its own samples" in cause
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


def test_one_process_is_equal() -> None:
    net = PlainNet()
    report = compare(capture(net), net, batch_of(0), step)
    assert str(report) == "the first step of PlainNet on 1 rank equals that of one process."
