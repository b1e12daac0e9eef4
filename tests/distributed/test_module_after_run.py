"""After a run, the module is the user's again: whole, plain, and ready for any other Trainer."""

import tempfile
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par import Hybrid3DStrategy
from lightning_par.errors import ConfigurationError
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import ranks, run_ranks
from tests.support.user_code import LAYOUTS

SIZES = ["tp2", "pp2", "tp2pp2", "zero0", "zero1", "zero3"]


def attributes(module: nn.Module) -> dict[str, Any]:
    """Classes, plain attributes, and names of everything that modules hold."""
    found: dict[str, Any] = {}
    for name, each in module.named_modules():
        found[name] = type(each)
        for key, value in vars(each).items():
            if key in ("_trainer", "_hparams", "_current_fx_name", "_device"):
                continue
            where = f"{name}.{key}"
            found[where] = list(value) if isinstance(value, dict | set) else type(value)
            if isinstance(value, int | str | tuple):
                found[where] = value
    return found


def changes(module: nn.Module, before: dict[str, Any]) -> dict[str, Any]:
    """What `attributes` says now where it differs."""
    now = attributes(module)
    return {k: (before.get(k), now.get(k)) for k in before | now if before.get(k) != now.get(k)}


def loader(layout: str | None, rank: int) -> DataLoader[Any]:
    torch.manual_seed(0)
    samples = token_pairs(16)
    if not (layout or "").startswith("zero"):
        return DataLoader(samples, 8)
    sampler: Any = DistributedSampler(samples, 2, rank, shuffle=False)  # type: ignore[arg-type]
    return DataLoader(samples, 4, sampler=sampler)


def make_trainer(layout: str | None, world: int, **options: Any) -> Any:
    strategy = "auto" if layout is None else Hybrid3DStrategy(**LAYOUTS[layout], **options)
    return quiet_trainer(devices=world, strategy=strategy, max_epochs=1, precision="64-true")


def two_fits(layouts: list[str | None], rank: int, world: int) -> dict[str, torch.Tensor]:
    """Train the same module in one Trainer after the other, with another learning rate."""
    seed_everything(0, verbose=False)
    module = PlainModule()
    for number, layout in enumerate(layouts):
        module.lr = 0.5 / (1 + number)
        make_trainer(layout, world).fit(module, loader(layout, rank))
        if number == 0:
            with torch.no_grad():
                module.net.head.weight.data.mul_(0.9)  # between two runs it is the user's
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("layout", SIZES)
def test_module_is_whole_and_plain_after_a_fit(layout: str) -> None:
    run_ranks(_check_after_fit, 4 if layout == "tp2pp2" else 2, layout, timeout=120)


def _check_after_fit(rank: int, world: int, layout: str) -> None:
    seed_everything(0, verbose=False)
    module = PlainModule().double()
    held = dict(module.named_parameters())
    before = attributes(module)
    trainer = make_trainer(layout, world)
    trainer.fit(module, loader(layout, rank))
    assert changes(module, before) == {}
    assert all(held[name] is p for name, p in module.named_parameters())  # the user may hold them
    weights = module.state_dict()
    seen: list[Any] = [None] * world
    torch.distributed.all_gather_object(seen, {k: v.tolist() for k, v in weights.items()})
    assert all(each == seen[0] for each in seen)
    gathered = trainer.strategy.gather_state_dict()
    if rank == 0:
        assert list(gathered) == list(weights)
        for name, value in gathered.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=0)
    x = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    assert module.net(x).shape == (2, 12, 64)
    module.net(x).sum().backward()
    assert changes(module, before) == {}


@pytest.mark.parametrize(
    "layouts", [("tp2", "tp2"), ("pp2", "zero3"), ("zero3", "pp2"), ("zero1", "tp2")]
)
def test_another_trainer_goes_on_with_the_module(layouts: tuple[str, str]) -> None:
    want = two_fits([None, None], 0, 1)
    for got in run_ranks(_two_fits_rank, 2, layouts, timeout=120):
        assert list(got) == list(want)
        for name, value in got.items():
            torch.testing.assert_close(value, want[name], rtol=0, atol=1e-9)


def _two_fits_rank(rank: int, world: int, layouts: tuple[str, str]) -> dict[str, torch.Tensor]:
    return two_fits(list(layouts), rank, world)


@pytest.mark.parametrize("layout", ["tp2", "pp2", "zero3"])
def test_same_trainer_fits_and_saves_again(layout: str, tmp_path: Any) -> None:
    run_ranks(_fit_and_save, 2, layout, str(tmp_path), timeout=120)


def _fit_and_save(rank: int, world: int, layout: str, folder: str) -> None:
    seed_everything(0, verbose=False)
    module = PlainModule()
    trainer = make_trainer(layout, world, save_distributed_checkpoint=False)
    trainer.fit(module, loader(layout, rank))
    before = attributes(module)
    with torch.no_grad():
        module.net.head.weight.mul_(0.5)  # what is saved is what the module holds now
    trainer.save_checkpoint(f"{folder}/x.ckpt")
    assert changes(module, before) == {}
    with trainer.strategy.whole() as found, trainer.strategy.whole(module.net, "rank 0") as net:
        assert found is module
        assert net is (module.net if rank == 0 else None)
    saved = torch.load(f"{folder}/x.ckpt", weights_only=True)
    for name, value in module.state_dict().items():
        torch.testing.assert_close(saved["state_dict"][name], value, rtol=0, atol=0)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader(layout, rank))
    assert trainer.current_epoch == 2
    assert changes(module, before) == {}


@ranks(2)
def test_parts_stay_where_whole_modules_are_not_wanted(rank: int, world: int) -> None:
    seed_everything(0, verbose=False)
    module, seen = PlainModule(), list[set[str]]()
    whole = set(module.state_dict())
    trainer = make_trainer("pp2", world, gather_after_run=False)
    trainer.fit(module, loader("pp2", rank))
    own = vars(module)
    own["on_save_checkpoint"] = lambda checkpoint: seen.append(set(checkpoint["state_dict"]))
    trainer.save_checkpoint(f"{trainer.strategy.broadcast(tempfile.mkdtemp())}/parts.ckpt")
    assert seen[0] < whole
    assert not isinstance(module.net.head, nn.Linear) or rank == 1


def two_trainers(rank: int, world: int, layout: str | None, folder: str) -> dict[str, torch.Tensor]:
    """Train in one Trainer, and go on in another with a new module; on a mesh, the old one is
    refused.
    """
    options = {} if layout is None else {"gather_after_run": False}
    seed_everything(0, verbose=False)
    module = PlainModule()
    first = make_trainer(layout, world, **options)
    first.fit(module, loader(layout, rank))
    first.save_checkpoint(f"{folder}/{layout}.ckpt")
    if layout is not None:
        with pytest.raises(ConfigurationError, match=r"or make a new module .* ckpt_path=.*LP914"):
            make_trainer(layout, world).fit(module, loader(layout, rank))
    # One process loads weights before the Trainer has made the module one of float64.
    module, second = PlainModule().double(), make_trainer(layout, world)
    second.fit_loop.max_epochs = 2
    second.fit(module, loader(layout, rank), ckpt_path=f"{folder}/{layout}.ckpt")
    assert second.current_epoch == 2
    return module.state_dict()


@pytest.mark.parametrize("layout", ["pp2", "zero3"])
def test_new_module_goes_on_from_a_checkpoint(layout: str, tmp_path: Any) -> None:
    (want,) = run_ranks(two_trainers, 1, None, str(tmp_path), timeout=120)
    for got in run_ranks(two_trainers, 2, layout, str(tmp_path), timeout=120):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9)
