"""Fixtures for every test, split by topic. Servers start when a test first needs them."""

import os

import pytest
from hypothesis import HealthCheck, settings

# A deadline for one example, or for some, measures the machine, not the code.
settings.register_profile(
    "towpath", settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("towpath")

pytest_plugins = [
    "tests.fixtures.fix_postgres",
    "tests.fixtures.fix_kafka",
    "tests.fixtures.fix_rabbitmq",
    "tests.fixtures.fix_proxy",
    "tests.fixtures.fix_schema",
    "tests.fixtures.fix_cli",
    "tests.fixtures.fix_world",
    "tests.fixtures.fix_telemetry",
]

SERVER_FIXTURES = {
    "postgres_url",
    "postgres_server",
    "kafka_bootstrap",
    "kafka_server",
    "embedded_kafka",
    "rabbit_url",
    "rabbit_server",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what needs a server, for the quick check to leave out; files with slow tests come first."""
    for item in items:
        if SERVER_FIXTURES & set(getattr(item, "fixturenames", ())):
            item.add_marker("services")
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)  # or one process ends long after the other


@pytest.fixture(scope="session")
def scale() -> float:
    """How much of the slow cases to run: 1 in CI, more by hand or at night."""
    return float(os.environ.get("TOWPATH_TEST_SCALE", "1"))
