"""Matrices of an optimizer that are whole on one rank each, and the states they leave."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor, DTensor, Replicate, Shard

from lightning_par.dtensor import whole
from lightning_par.strategies.optimizers.owners import Owners
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.one_gpu import on_cuda
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import ranks, run_ranks
from tests.support.user_code import strategy_of

DEVICE = "cuda" if on_cuda() else "cpu"
KINDS = [
    (Shard(0), Replicate()),
    (Replicate(), Shard(1)),
    (Shard(0), Shard(1)),
    (Shard(1), Shard(1)),
]
SHAPES = [(7, 5), (1, 5), (8, 6), (3, 9), (2, 4), (6, 6), (5, 3), (4, 4)]


def update(tensor: Any, state: dict[str, Any]) -> None:
    """Move a tensor, and write a state of every kind; some come only in the second step."""
    mean = state.setdefault("mean", torch.zeros_like(tensor, dtype=torch.float32))
    mean.lerp_(tensor.grad.float(), 0.5)
    state["row"] = mean.square().mean(1)
    state["step"] = state.get("step", torch.zeros(())) + 1
    state["count"], state["decays"] = state.get("count", 0) + 1, True
    if state["count"] > 1:
        state["late"], state["name"] = mean.clone().double(), "late"
    tensor.add_(mean / (1 + state["row"][:, None]) + state["step"] + state["count"])


def values(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=generator, dtype=torch.bfloat16) for _ in range(2)]
    return made[0].to(DEVICE), made[1].to(DEVICE)


def made(mesh: Any) -> tuple[list[nn.Parameter], list[Any]]:
    """Return whole parameters, and shards of them; no batch has reached some."""
    plain, parameters = [], []
    for seed, (shape, kind) in enumerate((s, k) for k in KINDS for s in SHAPES):
        weight, grad = values(shape, seed)
        plain.append(nn.Parameter(weight.clone()))
        parameters.append(nn.Parameter(distribute_tensor(weight, mesh, kind)))
        if seed % 7 != 3:
            plain[-1].grad, parameters[-1].grad = grad, distribute_tensor(grad, mesh, kind)
    return plain, parameters


@torch.no_grad()
def step_once(parameters: Iterable[nn.Parameter], states: dict[Any, Any]) -> None:
    for parameter in (p for p in parameters if p.grad is not None):
        update(parameter, states.setdefault(parameter, {}))


def assert_same_states(found: dict[str, Any], wanted: dict[str, Any], parameter: Any) -> None:
    assert list(found) == list(wanted)
    for name, value in wanted.items():
        if isinstance(value, Tensor):
            full = whole(found[name])
            assert (full.dtype, torch.equal(full, value)) == (value.dtype, True), name
        else:
            assert (type(found[name]), found[name]) == (type(value), value)
    if found:
        assert found["mean"].placements == parameter.placements
        assert isinstance(found["row"], DTensor)
        assert not isinstance(found["step"], DTensor)


@ranks(6)
def test_every_rank_gets_its_shards_of_what_the_owners_compute(rank: int, world: int) -> None:
    mesh = init_device_mesh(DEVICE, (3, 2), mesh_dim_names=("dp", "tp"))
    plain, parameters = made(mesh)
    rest = nn.Parameter(torch.ones(3, 3, device=DEVICE))
    empty = lambda p: nn.Parameter(torch.empty(0, dtype=p.dtype, device=DEVICE))  # noqa: E731
    tensors, few = [empty(p) for p in parameters], empty(parameters[0])
    members = [(0, t, p) for t, p in zip(tensors, parameters, strict=True)]
    owners = Owners([*members, (0, nn.Parameter(rest.clone()), rest), (1, few, parameters[0])])
    assert few not in owners, "a group with fewer matrices than ranks"
    assert all(t in owners for t in tensors)
    states: dict[Any, Any] = {rest: {"kept": 1}}
    reference: dict[Any, Any] = {}
    for step in range(3):
        owners.gather(states)
        mine = [t for t in tensors if not owners.is_elsewhere(t)]
        assert mine, "every rank has some"
        assert all(not t.numel() for t in tensors if owners.is_elsewhere(t))
        step_once(mine, states)
        step_once(plain, reference)
        if step == 1:  # the step goes on after another closure
            owners.scatter(states, keep=True)
            owners.gather(states)
        owners.scatter(states, keep=False)
        assert states.keys() <= {*parameters, rest}
    for wanted, parameter in zip(plain, parameters, strict=True):
        assert torch.equal(whole(parameter.detach()), wanted)
        assert (parameter in states) == (wanted in reference)
        assert_same_states(states.get(parameter, {}), reference.get(wanted, {}), parameter)
    counts = torch.tensor([not owners.is_elsewhere(t) for t in tensors], device=DEVICE).int()
    torch.distributed.all_reduce(counts)
    copies = [2, 3, 1, 1]  # ranks along an axis that shards nothing compute alike
    assert counts.tolist() == [copies[i // len(SHAPES)] for i in range(len(tensors))]


class Watched(torch.optim.Muon):
    """Notes what is whole on this rank while it steps."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.bytes = sum(
            p.numel() * p.element_size() for g in self.param_groups for p in g["params"]
        )
        self.count = sum(len(group["params"]) for group in self.param_groups)
        return loss


@ranks(2)
@pytest.mark.parametrize("layout", ["tp2", "zero3"])
def test_a_rank_holds_its_share_of_the_matrices(rank: int, world: int, layout: str) -> None:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            return Watched([p for p in self.parameters() if p.ndim == 2], lr=0.1)

    module = Module()
    total = sum(p.numel() * p.element_size() for p in module.parameters() if p.ndim == 2)
    count = sum(p.ndim == 2 for p in module.parameters())
    trainer = quiet_trainer(devices=2, strategy=strategy_of(layout), max_steps=2)
    trainer.fit(module, torch.utils.data.DataLoader(token_pairs(), batch_size=4))
    optimizer: Any = trainer.optimizers[0]
    optimizer = getattr(optimizer, "optimizer", optimizer)
    held = torch.tensor([optimizer.bytes, optimizer.count])
    parts = [torch.empty_like(held) for _ in range(2)]
    torch.distributed.all_gather(parts, held)
    assert sum(part[1] for part in parts) == count
    assert sum(part[0] for part in parts) == total
    assert max(part[0] for part in parts) < 0.7 * total


def save_after(rank: int, world: int, layout: str | None, path: Path) -> None:
    class Module(PlainModule):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adafactor(self.parameters(), lr=0.1)

    torch.manual_seed(0)
    trainer = quiet_trainer(
        devices=world, strategy=strategy_of(layout), max_steps=2, precision="64-true"
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(token_pairs(), batch_size=8))
    trainer.save_checkpoint(path)


def test_states_of_other_shapes_are_saved_after_the_run(tmp_path: Path) -> None:
    run_ranks(save_after, 1, None, tmp_path / "one")
    run_ranks(save_after, 2, "tp2", tmp_path / "two")
    one, two = (
        torch.load(tmp_path / name)["optimizer_states"][0]["state"] for name in ("one", "two")
    )
    assert one.keys() == two.keys()
    for number, states in one.items():
        assert states.keys() == two[number].keys()
        for name, value in states.items():
            torch.testing.assert_close(two[number][name], value, rtol=1e-6, atol=1e-9)
