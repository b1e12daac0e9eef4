"""Tests here need hosts; where the machine can make none they are skipped, with the reason."""

import pytest

from tests.support.hosts import refusal


@pytest.fixture(autouse=True)
def _can_make_hosts():
    if reason := refusal():
        pytest.skip(reason)
