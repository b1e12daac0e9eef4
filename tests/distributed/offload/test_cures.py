"""What an optimizer on the host refuses, and the same run as the refusal advises."""

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_par.engine.memory import measured
from tests.support.models.plain_language_model import PlainModule, PlainNet, token_pairs
from tests.support.ranks.api import run_ranks
from tests.support.user_code import Cases, train_case

CASES = Cases(__name__, blocks=4)


def on_host(**offload: Any) -> dict[str, Any]:
    return {"offload_options": offload}


class Adam(PlainModule):
    """Steps with AdamW, which is moved to the host."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), 0.01)


class Twice(PlainNet):
    """Passes each block twice, recomputed by reentrant checkpoints: two parts of its gradients."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in (*self.blocks, *self.blocks):
            h = checkpoint(block, h, use_reentrant=True)
        return self.head(self.norm(h))


STREAMS = {"on_nonfinite": "ignore"}
PARTS = "was computed in several parts.*Use overlap='off'.*explain LP603"


@CASES.add(refused={"zero2": PARTS}, strategy=STREAMS | on_host(bucket_size_mb=1e-3))
def gradients_in_parts() -> Any:
    return Adam(Twice()), token_pairs()


@CASES.add(equal="zero2", strategy=STREAMS | on_host(bucket_size_mb=1e-3, overlap="off"))
def gradients_in_parts_without_overlap() -> Any:
    return Adam(Twice()), token_pairs()


class Halves(Adam):
    """Halves weights after each step."""

    def halve(self) -> None:
        with torch.no_grad():
            self.net.head.weight.mul_(0.5)

    def on_train_batch_end(self, *_: Any) -> None:
        self.halve()


WRITTEN = (
    "was changed while .* such as on_validation_start, or use delayed_update=False.*plain LP603"
)


@CASES.add(refused={"zero2": WRITTEN}, strategy=on_host(delayed_update=0))
def weights_written_in_an_update() -> Any:
    return Halves(), token_pairs()


@CASES.add(equal="zero2", strategy=on_host(delayed_update=False))
def weights_written_without_a_delay() -> Any:
    return Halves(), token_pairs()


class HalvesLater(Halves):
    """Halves weights before validation, which completes updates."""

    def on_train_batch_end(self, *_: Any) -> None:
        pass

    def on_validation_start(self) -> None:
        self.halve()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        return DataLoader(token_pairs(4), 4)


@CASES.add(equal="zero2", strategy=on_host(delayed_update=0), trainer={"val_check_interval": 1})
def weights_written_before_validation() -> Any:
    return HalvesLater(), token_pairs()


class HalvesAtTheEnd(HalvesLater):
    def on_validation_start(self) -> None:
        pass

    def on_train_end(self) -> None:
        self.halve()


@CASES.add(equal="zero2", strategy=on_host(delayed_update=3))
def weights_written_at_the_end() -> Any:
    return HalvesAtTheEnd(), token_pairs()


@pytest.mark.parametrize(("case", "layout", "refusal"), CASES.cells())
def test_refused_without_the_cure_and_equal_with_it(
    case: str, layout: str, refusal: str | None
) -> None:
    CASES.check(case, layout, refusal)


def run(rank: int, world: int, layout: str, options: dict[str, Any]) -> dict[str, Any]:
    case = replace(CASES.cases["weights_written_without_a_delay"], strategy=options)
    return train_case(case, layout, rank, world)


def assert_equal(results: list[dict[str, Any]]) -> None:
    wanted = train_case(CASES.cases["weights_written_without_a_delay"], None, 0, 1)
    for result in results:
        torch.testing.assert_close(result["losses"], wanted["losses"], rtol=0, atol=1e-6)
    torch.testing.assert_close(results[0]["weights"], wanted["weights"], rtol=0, atol=1e-8)


def test_without_a_compiler_the_kernel_of_torch_steps(tmp_path: Path) -> None:
    for result in run_ranks(without_a_compiler, 2, "native", str(tmp_path), timeout=180):
        assert "or use cpu_kernel='torch'. [lightning-par explain LP601]" in result["refused"]
    assert_equal(run_ranks(without_a_compiler, 2, "torch", str(tmp_path), timeout=180))


def without_a_compiler(rank: int, world: int, kernel: str, folder: str) -> dict[str, Any]:
    with mock.patch.dict(os.environ, {"PATH": folder, "XDG_CACHE_HOME": folder}):
        return run(rank, world, "zero2", on_host(cpu_kernel=kernel))


@pytest.mark.parametrize(
    ("kib", "layout", "advice"),
    [
        (1150, "zero2", "delayed_update=False"),
        (1000, "zero3", "zero_stage=3 and delayed_update=Fa"),
    ],
)
def test_the_option_that_a_misfit_names_fits(
    kib: int, layout: str, advice: str, tmp_path: Path
) -> None:
    """On a machine that says that it has so little memory left."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemAvailable: {kib} kB")
    for result in run_ranks(with_memory, 2, "zero2", on_host(delayed_update=1), str(meminfo)):
        assert re.search(f"cannot hold the model.*Use {advice}.*LP606", result["refused"])
    assert_equal(run_ranks(with_memory, 2, layout, on_host(), str(meminfo), timeout=180))


def with_memory(
    rank: int, world: int, layout: str, options: dict[str, Any], meminfo: str
) -> dict[str, Any]:
    with mock.patch.object(measured, "_MEMINFO", Path(meminfo)):
        return run(rank, world, layout, options)
