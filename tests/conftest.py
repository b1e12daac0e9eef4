"""What every test shares."""

import gc
import os
import sys
from pathlib import Path

import pytest

from tests.support.cuda_simulation import refusal
from tests.support.gloo_device import share_gloo_device
from tests.support.ranks.api import close_ranks

share_gloo_device()


def pytest_collection_modifyitems(items):
    if reason := refusal():
        for item in items:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """Half a million objects of modules stay; else each full collection looks at all of them.

    From here on what tests start by themselves begins sooner, see `quick_start`; not the workers
    and the zygote of the ranks, in whose place every fork would import transformers.
    """
    gc.collect()
    gc.freeze()
    path = [os.environ.get("PYTHONPATH"), str(Path(__file__).parent / "support" / "quick_start")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))


@pytest.fixture(scope="session", autouse=True)
def _no_rank_outlives_the_session():
    yield
    assert close_ranks() == [], "these processes of tests/support/ranks/api.py are still there"


@pytest.fixture(autouse=True)
def _no_process_group_outlives_its_test():
    """A strategy on one device makes a group in the test's own process, and Lightning leaves it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        os.environ.pop("MASTER_PORT", None)  # Lightning's choice, where the old store listens


@pytest.fixture(autouse=True)
def _no_seed_nor_rank_outlives_its_test():
    """Seeds in variables shuffle the samples of a later test; ranks but 0 warn of nothing."""
    yield
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        os.environ.pop(name, None)
    ranks = sys.modules.get("lightning_utilities.core.rank_zero")
    if ranks is not None and getattr(ranks.rank_zero_only, "rank", 0):
        ranks.rank_zero_only.rank = 0
