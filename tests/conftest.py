"""What every test shares."""

import pytest

from tests.ranks import close_ranks


@pytest.fixture(scope="session", autouse=True)
def _no_rank_outlives_the_session():
    yield
    assert close_ranks() == [], "these processes of tests/ranks.py are still there"
