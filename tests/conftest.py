"""Fixtures for every test, split by topic. Servers start when a test first needs them."""

import os

import pytest

pytest_plugins = [
    "tests.fixtures.fix_postgres",
    "tests.fixtures.fix_kafka",
    "tests.fixtures.fix_rabbitmq",
    "tests.fixtures.fix_proxy",
    "tests.fixtures.fix_schema",
]


@pytest.fixture(scope="session")
def scale() -> float:
    """How much of the slow cases to run: 1 in CI, more by hand or at night."""
    return float(os.environ.get("TOWPATH_TEST_SCALE", "1"))
