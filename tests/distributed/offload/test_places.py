"""States in a file, a part of them on the device, parameters on the host: the same numbers."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_par.engine.offload.host_storage import allocate, HostStorage, offloaded_parameters
from lightning_par.engine.offload.options import OffloadOptions
from lightning_par.errors import ConfigurationError, OffloadError
from tests.distributed.offload.test_parity import assert_as_one_process, with_defaults
from tests.support.models.toy_gpt import loader, ToyData, ToyModule
from tests.support.offload_runs import KINDS, run_offloaded, same_weights
from tests.support.parity import one_process, quiet_trainer, Result, TOLERANCE
from tests.support.ranks.api import ranks

CLIPPED = {"trainer": {"gradient_clip_val": 0.05}}
IGNORE = {"on_nonfinite": "ignore"}


def assert_same_numbers(results: list[Result], run: dict[str, Any], replicas: int) -> None:
    whole = one_process(repr(run))
    for result in results:
        torch.testing.assert_close(result["losses"], whole["losses"], rtol=0, atol=TOLERANCE)
    for name, weight in results[0]["weights"].items():
        torch.testing.assert_close(weight, whole["weights"][name], rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("fraction", "world"), [(0.0, 1), (0.5, 1), (0.5, 2)])
@pytest.mark.parametrize("more", [CLIPPED, {}], ids=["clipped", "free"])
def test_fraction_on_the_host_computes_the_same(fraction: float, world: int, more: Any) -> None:
    run = with_defaults(more)
    part = {**run, "batch_size": 4 // world}
    options = {"offload_fraction": fraction, **({} if more else IGNORE)}
    results = run_offloaded("zero_offload", options, world, part)
    assert_same_numbers(results, run, world)
    for result in results:
        # Of the last parameters; the first of them may reach beyond the fraction.
        share = result["host_bytes"] / (32 * result["parameters"])
        assert fraction <= share < fraction + 0.15
        gone = [grad is None for grad in result["gradients"][0].values()]
        assert any(gone) == bool(fraction)
        assert not all(gone)


def test_fraction_in_bfloat16_keeps_masters_everywhere() -> None:
    run = with_defaults({"trainer": {"precision": "bf16-true"}, "size": 20})
    (half,) = run_offloaded("zero_offload", {"offload_fraction": 0.5}, 1, run)
    (whole,) = run_offloaded("zero_offload", {}, 1, run)
    # What the device steps differs by a rounding of float32, which bfloat16 hardly ever shows.
    pairs = zip(half["steps"][0], whole["steps"][0], strict=True)
    differ = sum(int((a != b).sum()) for a, b in pairs)
    assert differ < 1e-3 * whole["parameters"]


def test_fraction_takes_the_last_parameters() -> None:
    sizes = [40, 30, 20, 10]
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
    for fraction, count in ((0, 0), (0.05, 1), (0.1, 1), (0.3, 2), (0.31, 3), (1, 4)):
        chosen = offloaded_parameters(parameters, fraction)
        assert [p.numel() for p in chosen] == sizes[len(sizes) - count :]


class Places(Callback):
    """Where parameters and their shards are, in bytes of the host; asserts on the rank."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        host = trainer.strategy.parallel_model.host
        assert all(not held.slots for held in host._held.values())
        policies = {
            module._get_fsdp_state()._fsdp_param_group.offload_policy.__class__.__name__
            for module in pl_module.modules()
            if hasattr(module, "_get_fsdp_state")
        }
        assert policies == {"CPUOffloadPolicy"}


def places() -> list[Callback]:
    return [Places()]


@pytest.mark.parametrize("trainer", [CLIPPED["trainer"], {"accumulate_grad_batches": 2}])
def test_parameters_on_the_host_compute_the_same(trainer: dict[str, Any]) -> None:
    run = with_defaults({"trainer": trainer, "size": 18})
    options = {"stage": 3, "offload_parameters": True}
    part = {**run, "batch_size": 2}
    results = run_offloaded("zero_offload", options, 2, part, callbacks=places)
    assert_as_one_process(results, run, 2)
    for result in results:
        assert result["host_bytes"] == 24 * result["parameters"]  # no slots


@ranks(1)
def test_parameters_on_the_host_need_shards(rank: int, world: int) -> None:
    strategy = KINDS["zero_offload"](stage=3, offload_parameters=True)
    says = r"offload_parameters=True with zero_stage=3 on .* is not supported: it needs weights"
    trainer = quiet_trainer(strategy=strategy, devices=1, max_steps=1)
    with pytest.raises(ConfigurationError, match=says):
        trainer.fit(ToyModule(blocks=1), loader(ToyData(4), 2), loader(ToyData(4), 2))


@pytest.mark.parametrize("delay", [False, 1])
def test_states_in_a_file_change_no_bit(delay: Any, tmp_path: Path) -> None:
    options = {**IGNORE, "bucket_size_mb": 1e-3, "delayed_update": delay}
    for world in (1, 2):
        run = with_defaults({"trainer": {"precision": "32-true"}, "batch_size": 4 // world})
        file = {**options, "offload_optimizer": f"nvme:{tmp_path}"}
        in_file = run_offloaded("zero_offload", file, world, run)
        in_memory = run_offloaded("zero_offload", options, world, run)
        assert same_weights(in_file[0], in_memory[0])
        assert [r["losses"] for r in in_file] == [r["losses"] for r in in_memory]
    assert list(tmp_path.iterdir()) == []  # the file has no name


def in_file(folder: Path, n: int = 5000) -> Any:
    parameters = [torch.nn.Parameter(torch.ones(n)), torch.nn.Parameter(torch.ones(3, 7))]
    options = OffloadOptions(offload_optimizer=f"nvme:{folder}")
    return allocate(parameters, options, torch.device("cpu"))


def test_file_is_mapped_has_no_name_and_gives_its_pages_back(tmp_path: Path) -> None:
    held, _ = in_file(tmp_path)
    maps = Path("/proc/self/maps")
    if maps.exists():
        mapped = [line for line in maps.read_text().splitlines() if str(tmp_path) in line]
        assert mapped
        assert all(line.endswith("(deleted)") for line in mapped)
    assert list(tmp_path.iterdir()) == []
    for value, one in enumerate(held.values(), 1):
        for tensor in (one.master, one.mean, one.square):
            assert not tensor.any()
            tensor.fill_(value)
        assert one.nvme is not None
        assert one.nvme.start % os.sysconf("SC_PAGE_SIZE") == 0
        one.nvme.flush()
        one.nvme.release()
        one.nvme.will_need()
    for value, one in enumerate(held.values(), 1):  # and nothing was lost or shared
        for tensor in (one.master, one.mean, one.square):
            assert tensor.unique().tolist() == [value]


def test_folder_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r'"nvme:.*/none": there is no such folder'):
        in_file(tmp_path / "none")


def test_disk_that_is_full_is_refused_before_the_first_step(tmp_path: Path) -> None:
    """More than any disk has; nothing stays behind."""
    with pytest.raises(
        OffloadError, match=r"needs 1,152,921,504,606,846,976 bytes there, but only"
    ):
        HostStorage(tmp_path, 2**60)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self").exists(), reason="no /proc")
def test_folder_that_cannot_be_written_is_named() -> None:
    with pytest.raises(OffloadError, match=r'"nvme:/proc/self": .* cannot be written there '):
        HostStorage(Path("/proc/self"), 4096)


@ranks(1)
def test_kernel_that_runs_is_named(rank: int, world: int) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    try:
        trainer = quiet_trainer(
            strategy=KINDS["zero_offload"](cpu_kernel="torch"), devices=1, max_steps=1
        )
        trainer.fit(ToyModule(blocks=1), loader(ToyData(4), 2), loader(ToyData(4), 2))
    finally:
        logger.removeHandler(handler)
    assert "The optimizer steps are computed on the CPU, with the kernel 'torch'." in said
