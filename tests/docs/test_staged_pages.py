"""Operators' pages about rare states: each is brought about, then commands print what the page shows."""

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from uuid_utils.compat import uuid7

from tests.docs.pages import blocks
from tests.docs.test_consuming_page import write_package
from tests.docs.test_operations import follow
from tests.fixtures.fix_cli import Run
from tests.fixtures.graveyard import bury
from tests.integration.wired import new_name
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import GroupTopology, OutboundMessage
from towpath.cli.checkup import CHECKS


async def _doubtful_task(url: str) -> str:
    db: asyncpg.Connection[Any] = await asyncpg.connect(url)
    (id_,) = await bury(db, ["o-1"])
    await db.execute("update towpath.task set state = 'UNKNOWN', finished_at = null")
    await db.close()
    return str(id_)


def test_a_task_in_doubt_is_found_and_resolved(towpath: Run, migrated_url: str) -> None:
    id_ = asyncio.run(_doubtful_task(migrated_url))

    follow("docs/operating/unknown.md", towpath, **{"<message id>": id_})

    (task,) = json.loads(towpath("tasks", "show", id_, "--json").out)
    assert task["state"] == "SUCCEEDED"


async def _forgotten_group(url: str, broker_url: str, group: str, topic: str) -> None:
    """A topic with five records, of which the group read three before the broker forgot it."""
    broker = broker_from_url(broker_url, {})
    admin, publisher = broker.admin(), broker.publisher()
    await admin.apply([], [GroupTopology(group, (topic,))], partitions=1)
    messages = [OutboundMessage(uuid7(), number, topic, "raw", None, 0, (), b"1") for number in range(5)]
    sent = await publisher.publish(messages, timeout_seconds=60)
    assert set(range(5)) == set(sent.acknowledged)
    await publisher.aclose()
    await admin.aclose()
    db: asyncpg.Connection[Any] = await asyncpg.connect(url)
    await db.execute(
        "insert into towpath.group_offset (consumer_group, address, partition, position, refused) "
        "values ($1, $2, 0, 3, 'offset_missing')",
        group,
        topic,
    )
    await db.close()


def test_a_word_is_given_for_offsets_that_are_gone(
    towpath: Run, migrated_url: str, kafka_bootstrap: str, clean_environment: pytest.MonkeyPatch
) -> None:
    group, topic, broker_url = new_name("billing"), new_name("orders"), f"kafka://{kafka_bootstrap}"
    asyncio.run(_forgotten_group(migrated_url, broker_url, group, topic))
    clean_environment.setenv("TOWPATH_BROKER_URL", broker_url)

    follow("docs/operating/offsets.md", towpath, billing=group, orders=topic)


def _forget_package() -> None:
    for name in ("billing", "billing.consumer"):
        sys.modules.pop(name, None)


def test_doctor_looks_at_everything_the_page_names(
    towpath: Run, clean_environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clean_environment.syspath_prepend(write_package(tmp_path))
    clean_environment.setenv("TOWPATH_BROKER_URL", f"memory://{new_name('orders')}")

    _forget_package()  # another test's
    try:
        follow("docs/operating/doctor.md", towpath)
    finally:
        _forget_package()

    (example,) = [block.text for block in blocks("docs/operating/doctor.md") if block.language == "text"]
    named = {line[13:32].strip() for line in example.splitlines() if line != "…"}
    assert named <= {check.name for check in CHECKS}
