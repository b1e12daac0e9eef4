"""Islands under the Trainer: equal to one process where they have to be, on any mesh."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_par.models.data.resumable_loader import ReplicaSampler, ResumableLoader
from tests.support.exhaustive import some
from tests.support.islands import KEY, part_from_other_islands, serving, SYNCHRONOUS
from tests.support.models.toy_gpt import ToyModule
from tests.support.parity import quiet_trainer, train
from tests.support.ranks.api import run_ranks

ONES = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}


def island_rank(
    rank: int,
    world: int,
    sizes: list[int],
    options: list[dict[str, Any]],
    outer: dict[str, Any],
    folder: Path,
    run: dict[str, Any],
) -> Any:
    """Train on the ranks of this rank's island, which have a default group of their own."""
    from lightning_par import Hybrid3DStrategy

    island = next(i for i in range(len(sizes)) if rank < sum(sizes[: i + 1]))
    size = sizes[island]
    part_from_other_islands(folder, island, rank - sum(sizes[:island]), size)
    place = {"island": island, "islands": len(sizes), "key_file": str(folder / "key")}
    strategy = Hybrid3DStrategy(**options[island], outer={**outer, **place})
    run = {**run, "batch_size": run["batch_size"][island]}
    result = train(strategy, devices=size, **run)
    return {"island": island, "weights": result["weights"], "shapes": result["shapes"]}


def run_islands(
    sizes: list[int], options: list[dict[str, Any]], folder: Path, run: Any, **outer: Any
) -> list[Any]:
    """Train islands of these numbers of ranks; give what each rank returned."""
    (folder / "key").write_bytes(KEY)
    with serving() as server:
        told = {"server": f"127.0.0.1:{server.port}", "min_islands": len(sizes), "timeout": 60}
        rest = sizes, options, {**told, **outer}, folder, run
        found: list[Any] = run_ranks(island_rank, sum(sizes), *rest, timeout=120, fresh=True)
        assert server.meeting.weights is not None
        assert [f.version for f in server.meeting.weights.fragments] == [3 // outer["every"]]
    return found


def one_process(**run: Any) -> dict[str, torch.Tensor]:
    """Return the weights after the same run in this process, in float64."""
    try:
        found: dict[str, torch.Tensor] = train("auto", devices=1, **run)["weights"]
        return found
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("optimizer", some(["sgd", "adamw"], large=["adamw"]))
def test_an_exchange_after_every_step_equals_synchronous_sgd(
    optimizer: str, tmp_path: Path
) -> None:
    run: dict[str, Any] = {"module": {"optimizer": optimizer}, "size": 12, "batch_size": [2, 2]}
    results = run_islands([1, 1], [ONES, ONES], tmp_path, run, **SYNCHRONOUS)
    wanted = one_process(**{**run, "batch_size": 4})
    for result in results:
        close = {"rtol": 0, "atol": 1e-12}
        if optimizer == "sgd":
            torch.testing.assert_close(result["weights"], wanted, **close)
        else:  # Adam's steps are not linear in the gradients: the comparison can fail
            with pytest.raises(AssertionError, match="Mismatched elements"):
                torch.testing.assert_close(result["weights"], wanted, **close)


def test_islands_of_tensor_and_of_pipeline_parallelism_hold_the_same_bits(tmp_path: Path) -> None:
    options = [
        {**ONES, "tensor_parallel_size": 2},
        {**ONES, "pipeline_parallel_size": 2, "num_microbatches": 2},
    ]
    run = {"batch_size": [2, 2], "size": 12, "proves": True}
    results = run_islands([2, 2], options, tmp_path, run, every=3, quantize="int8")
    first, _, second, _ = results
    assert first["weights"].keys() == second["weights"].keys()
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name
    shapes = [result["shapes"] for result in results]
    assert shapes[0] != shapes[2]
    assert shapes[2] != shapes[3]
    torch.set_default_dtype(torch.float64)
    try:
        start = ToyModule().state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    trained = [name for name in start if name.endswith("weight")]
    assert not any(torch.equal(start[n], first["weights"][n]) for n in trained)


def test_replicas_of_an_island_and_another_island_divide_the_samples(tmp_path: Path) -> None:
    """ZeRO 3 over two replicas beside one device: together they equal one process."""
    options = [{**ONES, "zero_stage": 3}, ONES]
    run: dict[str, Any] = {"module": {"optimizer": "sgd"}, "size": 12, "batch_size": [1, 2]}
    results = run_islands([2, 1], options, tmp_path, run, **SYNCHRONOUS)
    wanted = one_process(**{**run, "batch_size": 4})
    assert results[0]["weights"].keys() == results[2]["weights"].keys()
    for result in (results[0], results[2]):
        torch.testing.assert_close(result["weights"], wanted, rtol=0, atol=1e-12)


class Watch(Callback):
    """Notes the weights that validation sees, and saves a checkpoint, after 3 steps."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: dict[str, torch.Tensor] = {}
        self.own: dict[str, torch.Tensor] = {}

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.seen = {n: p.detach().clone() for n, p in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 3:
            self.own = {n: p.detach().clone() for n, p in pl_module.named_parameters()}
            trainer.save_checkpoint(self.path)


def watched_island(rank: int, world: int, outer: dict[str, Any], folder: Path) -> Any:
    from lightning_par import Hybrid3DStrategy

    strategy = Hybrid3DStrategy(outer=outer)
    watch = Watch(folder / f"{outer['island']}.ckpt")
    callbacks = [watch]
    train(
        strategy,
        devices=1,
        batch_size=2,
        size=8 * outer["islands"],
        trainer={"max_steps": 4, "val_check_interval": 3},
        callbacks=callbacks,
    )
    return watch.seen, watch.own


def test_validation_and_checkpoints_see_the_shared_weights(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(KEY)
    outer = {"every": 2, "optimizer": "average", "quantize": "none", "timeout": 60}
    outer |= {"key_file": str(tmp_path / "key"), "islands": 2}
    with serving() as server:
        outer["server"] = f"127.0.0.1:{server.port}"
        for island in range(2):  # one after the other: the second one goes on from the first
            told = {**outer, "island": island, "min_islands": 1, "grace": 0}
            ((seen, own),) = run_ranks(watched_island, 1, told, tmp_path, timeout=60)
            if island == 0:
                assert not any(torch.equal(seen[n], own[n]) for n in own)
                saved = torch.load(tmp_path / "0.ckpt", weights_only=False)["state_dict"]
                assert all(torch.equal(saved[n], seen[n]) for n in seen)
        # All steps were made when the second island came: it makes one round of 2, and ends.
        assert not own
        assert server.meeting.weights is not None
        assert [f.version for f in server.meeting.weights.fragments] == [3]
    assert not (tmp_path / "1.ckpt").exists()


class Samples(Callback):
    """Notes what every batch has, and fails after so many; 0: never."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.seen: list[list[int]] = []
        self.rates: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, out: Any, batch: Any, i: int) -> None:
        self.seen.append(batch[:, 0].tolist())
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        if len(self.seen) == self.most:
            raise KeyError("killed")


class Numbers(BoringModel):
    """Ten samples that are their numbers, in batches of two, shuffled; a rate for every epoch."""

    def train_dataloader(self) -> Any:
        samples: Any = torch.arange(10.0).repeat(32, 1).T
        return ResumableLoader(samples, batch_size=2, sampler=ReplicaSampler(samples, seed=4))

    val_dataloader: Any = None

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def returning_island(rank: int, world: int, outer: dict[str, Any], ends: list[int]) -> Any:
    from lightning_par import Hybrid3DStrategy

    found = []
    for most in ends:
        samples = Samples(most)
        strategy = Hybrid3DStrategy(outer=outer)
        trainer = quiet_trainer(
            devices=1, strategy=strategy, max_epochs=3, callbacks=[samples], limit_val_batches=0
        )
        with suppress(KeyError):
            trainer.fit(Numbers())
        found.append((samples.seen, samples.rates, trainer.global_step))
    return found


def test_an_island_that_comes_back_goes_on_in_its_data(tmp_path: Path) -> None:
    """Killed within an epoch, and at the end of one; between them the server ends, too."""
    (tmp_path / "key").write_bytes(KEY)
    outer = {"every": 2, "island": 0, "islands": 1, "key_file": str(tmp_path / "key")}
    order, rates = [], []
    for epoch in range(3):
        sampler = ReplicaSampler(range(10), seed=4)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        numbers = list(sampler)
        order += [numbers[at : at + 2] for at in range(0, 10, 2)]
        rates += [0.01 * 0.1**epoch] * 4 + [0.01 * 0.1 ** (epoch + 1)]  # after the last batch
    found = []
    # Killed after 7 and 11 batches: what was learned from the last one is lost, and is due again.
    for ends in ([7], [5, 0, 4]):
        with serving(tmp_path / "state") as server:
            told = {**outer, "server": f"127.0.0.1:{server.port}", "timeout": 60}
            (more,) = run_ranks(returning_island, 1, told, ends, timeout=60)
            found += more
    for (seen, had, steps), (low, high) in zip(
        found, [(0, 7), (6, 11), (10, 15), (0, 4)], strict=True
    ):
        assert seen == order[low:high]
        assert had == pytest.approx(rates[low:high])
        assert steps == high


class Momenta(Numbers):
    """The same with an optimizer that has a state."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def killed_island(rank: int, world: int, outer: dict[str, Any], ends: list[int]) -> Any:
    from lightning_par import Hybrid3DStrategy

    for most in ends:
        torch.manual_seed(0)
        module, callbacks = Momenta(), [Samples(most)]
        strategy = Hybrid3DStrategy(**ONES, zero_stage=3, outer=outer)
        options: dict[str, Any] = {"max_epochs": 3, "limit_val_batches": 0}
        trainer = quiet_trainer(devices=world, strategy=strategy, callbacks=callbacks, **options)
        with suppress(KeyError):
            trainer.fit(module)
    return {n: p.detach().clone() for n, p in module.named_parameters()}


@pytest.mark.parametrize("world", [1, 2], ids=["one rank", "sharded states"])
def test_an_island_that_keeps_its_optimizer_goes_on_as_if_it_had_not_been_killed(
    world: int, tmp_path: Path
) -> None:
    (tmp_path / "key").write_bytes(KEY)
    outer = {"every": 2, "island": 0, "islands": 1, "key_file": str(tmp_path / "key")}
    outer |= {"optimizer": "average", "quantize": "none", "timeout": 60}
    found = []
    for keep, ends in ((None, [0]), (tmp_path / "kept", [4, 0]), (None, [4, 0])):
        with serving() as server:
            told = {**outer, "server": f"127.0.0.1:{server.port}"}
            told["keep"] = None if keep is None else str(keep)
            found.append(run_ranks(killed_island, world, told, ends, timeout=180)[0])
    calm, kept, anew = found
    # The exchange subtracts movements from the shared weights, in float32.
    torch.testing.assert_close(kept, calm, rtol=0, atol=1e-5)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        torch.testing.assert_close(anew, calm, rtol=0, atol=1e-3)
    assert list((tmp_path / "kept").iterdir()) == []  # removed at the end of the fit
