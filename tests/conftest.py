"""What every test shares."""

import os
import sys
from pathlib import Path

import pytest

from tests.ranks import close_ranks


@pytest.hookimpl(tryfirst=True)
def pytest_ignore_collect(collection_path):
    """Collects tests/dist, although pytest passes over every folder called dist by default."""
    return False if collection_path == Path(__file__).parent / "dist" else None


@pytest.fixture(scope="session", autouse=True)
def _no_rank_outlives_the_session():
    yield
    assert close_ranks() == [], "these processes of tests/ranks.py are still there"


@pytest.fixture(autouse=True)
def _no_process_group_outlives_its_test():
    """A strategy on one device makes a group in the test's own process, and Lightning leaves it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        os.environ.pop("MASTER_PORT", None)  # Lightning's choice, where the old store listens
