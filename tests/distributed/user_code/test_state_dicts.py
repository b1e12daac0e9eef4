"""Modules that change their state dict on its way in or out: every layout loads what one process
loads.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader, DistributedSampler

from lightning_par import Hybrid3DStrategy
from tests.support.models.plain_language_model import PlainModule, token_pairs
from tests.support.parity import quiet_trainer
from tests.support.ranks.api import run_ranks
from tests.support.user_code import LAYOUTS


def _to_new_name(name: str) -> str:
    return name.replace("net.output.", "net.head.")


class Renaming(PlainModule):
    """Reads the names that its head had in an earlier version."""

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        renamed = {_to_new_name(name): value for name, value in state_dict.items()}
        return super().load_state_dict(renamed, strict, assign)


class Hooked(PlainModule):
    """Does the same by hooks, and forgives a norm that the earlier version had not."""

    def __init__(self) -> None:
        super().__init__()
        self.net.register_load_state_dict_pre_hook(self._rename)
        self.register_load_state_dict_post_hook(self._forgive)

    @staticmethod
    def _rename(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        for name in [name for name in state_dict if _to_new_name(name) != name]:
            state_dict[_to_new_name(name)] = state_dict.pop(name)

    @staticmethod
    def _forgive(module: Any, keys: Any) -> None:
        keys.missing_keys[:] = [key for key in keys.missing_keys if "net.norm." not in key]


class Counting(PlainModule):
    """Keeps what is no tensor, and a tensor that is none of its buffers, beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.total = 0, torch.zeros(2)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen += 1
        self.total = self.total + 1

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "total": self.total}

    def set_extra_state(self, state: Any) -> None:
        self.seen, self.total = state["seen"], state["total"]


class CountingInTensors(Counting):
    """Likewise; all of it is one tensor."""

    def get_extra_state(self) -> Any:
        return torch.cat([torch.tensor([float(self.seen)]), self.total])

    def set_extra_state(self, state: Any) -> None:
        self.seen, self.total = int(state[0]), state[1:].clone()


class HeadOnly(PlainModule):
    """Trains and saves the head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net.requires_grad_(False)
        self.net.head.requires_grad_(True)
        self.strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        whole = super().state_dict(*args, **kwargs)
        return {name: value for name, value in whole.items() if ".head." in name}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.head.parameters(), lr=self.lr)


class Migrating(PlainModule):
    """Renames what an earlier version has saved, in the checkpoint."""

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        state = checkpoint["state_dict"]
        for name in [name for name in state if _to_new_name(name) != name]:
            state[_to_new_name(name)] = state.pop(name)


class Filtering(HeadOnly):
    """Leaves the rest out of the checkpoint, not of the state dict; and doubles it as it loads."""

    state_dict = PlainModule.state_dict

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {n: v for n, v in state.items() if ".head." in n}

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        state = checkpoint["state_dict"]
        checkpoint["state_dict"] = {name: 2 * value for name, value in state.items()}


CASES = {
    "migrating": (Migrating, {"net.head.": "net.output."}, ()),
    "filtering": (Filtering, {}, ()),
    "renaming": (Renaming, {"net.head.": "net.output."}, ()),
    "hooked": (Hooked, {"net.head.": "net.output."}, ("net.norm.weight", "net.norm.bias")),
    "counting": (Counting, {}, ()),
    "counting in tensors": (CountingInTensors, {}, ()),
    "head_only": (HeadOnly, {}, ()),
}


def _fit(kind: type[PlainModule], layout: str | None, steps: int, path: Any = None) -> Any:
    seed_everything(0, verbose=False)
    module, samples = kind().double(), token_pairs()
    world = 1 if layout in (None, "one") else 2
    replicas = 2 if str(layout).startswith("zero") else 1
    sampler = None
    if replicas > 1:
        replica = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        sampler = DistributedSampler(samples, replicas, replica, shuffle=False)
    strategy: Any = "auto"
    if layout is not None:
        strategy = Hybrid3DStrategy(**LAYOUTS.get(layout, LAYOUTS["zero0"]))
    trainer = quiet_trainer(
        devices=world,
        strategy=strategy,
        precision="64-true",
        max_epochs=steps // 4,  # inside an epoch a run goes on with the samples to come
        max_steps=-1,
        num_sanity_val_steps=0,
    )
    trainer.fit(module, DataLoader(samples, 8 // replicas, sampler=sampler), ckpt_path=path)
    return module, trainer


def _found(module: PlainModule) -> dict[str, Any]:
    kept = {n: p.detach().clone() for n, p in module.named_parameters()}
    extra = {n: getattr(module, n) for n in ("seen", "total") if hasattr(module, n)}
    return {**kept, **extra}


def _go_on(rank: int, world: int, case: str, layout: str, folder: str) -> Any:
    kind = CASES[case][0]
    module, trainer = _fit(kind, layout, 8, Path(folder) / "old.ckpt")
    trainer.save_checkpoint(Path(folder) / "new.ckpt")
    found = [_found(module)]
    module, _ = _fit(kind, layout, 12, Path(folder) / "new.ckpt")
    return [*found, _found(module)]


@pytest.mark.parametrize("layout", ["one", "tp2", "pp2", "zero3"])
@pytest.mark.parametrize("case", CASES)
def test_a_changed_state_dict_is_loaded_as_one_process_loads_it(
    case: str, layout: str, tmp_path: Path
) -> None:
    kind, old_names, left_out = CASES[case]
    _, trainer = _fit(kind, None, 4)
    trainer.save_checkpoint(tmp_path / "old.ckpt")
    saved = torch.load(tmp_path / "old.ckpt", weights_only=False)
    for new, old in old_names.items():
        state = saved["state_dict"]
        saved["state_dict"] = {n.replace(new, old): v for n, v in state.items()}
    for name in left_out:
        del saved["state_dict"][name]
    torch.save(saved, tmp_path / "old.ckpt")

    wanted = []
    for steps in (8, 12):
        source = tmp_path / ("old.ckpt" if steps == 8 else "plain.ckpt")
        module, trainer = _fit(kind, None, steps, source)
        trainer.save_checkpoint(tmp_path / "plain.ckpt")
        wanted.append(_found(module))
    world = 1 if layout == "one" else 2
    for found in run_ranks(_go_on, world, case, layout, str(tmp_path), timeout=180):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-8)
