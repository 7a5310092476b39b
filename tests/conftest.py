"""Settings for every test: a slow machine must not fail a property by the clock."""

import os

import pytest
from hypothesis import settings

settings.register_profile("shardbox", deadline=None)
settings.load_profile("shardbox")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Files of several GB only where they are wanted."""
    if item.get_closest_marker("large") and not os.environ.get("SHARDBOX_LARGE"):
        pytest.skip("`make large` runs it")
