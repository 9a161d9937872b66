"""Whatever strangers send over a real broker ends in the catalog, and the partition moves on."""

from typing import Any

import pytest
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType

from tests.integration.engine import Posted, until
from tests.integration.wired import KAFKA, Wired, new_name, wired
from towpath.app import App
from towpath.brokers.ports import Headers
from towpath.messages import load_headers

pytestmark = pytest.mark.services

BODIES = (
    b'{"parcel":"' + b"x" * 10_000_000 + b'"',
    b"[" * 10_000 + b"]" * 10_000,
    b'{"parcel":"a","number":NaN}',
    b'{"parcel":"a","number":' + b"9" * 5_000 + b"}",
    b"\0" * 100,
    b'{"parcel":"\xff\xfe"}',
)
BOMB: Headers = tuple((f"h{number}", b"\0\xff" * 20) for number in range(1_000))


@pytest.mark.parametrize("kind", ["kafka", "rabbitmq"])
async def test_hostile_messages_end_in_the_catalog_and_tombstones_are_skipped(
    migrated_url: str, request: pytest.FixtureRequest, kind: str
) -> None:
    """X6, C11, D7: 10 MB, 10,000 levels, NaN, huge integers, NUL, invalid UTF-8, 1,000 headers, no value."""
    app, seen = App(new_name("depot")), list[Posted]()

    @app.transactional()
    async def sort(parcel: Posted) -> None:
        seen.append(parcel)

    app.ignore_nulls("parcels")
    options: dict[str, Any] = {"max_message_bytes": 12_000_000}
    if kind == "kafka":
        url = f"kafka://{request.getfixturevalue('kafka_bootstrap')}"
        options |= KAFKA
    else:
        url = request.getfixturevalue("rabbit_url")
    async with wired(app, migrated_url, url, options) as engine:
        if kind == "kafka":
            await _allow_large_records(url.removeprefix("kafka://"), engine.addresses["parcels"])
        bad = [await engine.publish_bytes(Posted, body, key="a") for body in BODIES]
        await engine.publish_raw("parcels", b"bomb", BOMB, key="a")
        await engine.publish_raw("parcels", None, key="a")
        good = await engine.publish(Posted("a", 1))
        async with engine.member():
            await engine.reaches(good, "SUCCEEDED")
            for id_ in bad:
                await engine.reaches(id_, "DEAD")
            await until(lambda: _are_dead(engine, len(BODIES) + 1))
            letters = await engine.letters()
        assert {letter["stage"] for letter in letters} == {"decode"}
        assert sorted(letter["payload"] for letter in letters) == sorted((*BODIES, b"bomb"))
        (bomb,) = [letter for letter in letters if letter["payload"] == b"bomb"]
        assert set(load_headers(bomb["headers"])) >= set(BOMB)
        assert seen == [Posted("a", 1)]
        copies = await engine.outbox("copy")
        assert max(len(copy["payload"]) for copy in copies) <= 16_384, "large bodies stay in the catalog"
        async with engine.member():  # nothing of it comes again
            again = await engine.publish(Posted("a", 2))
            await engine.reaches(again, "SUCCEEDED")
        assert {letter["death_count"] for letter in await engine.letters()} == {1}


async def _are_dead(engine: Wired, count: int) -> bool:
    return len(await engine.letters()) >= count


async def _allow_large_records(bootstrap: str, topic: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    try:
        changed = {"max.message.bytes": "12000000"}
        await admin.alter_configs([ConfigResource(ConfigResourceType.TOPIC, topic, changed)])
    finally:
        await admin.close()
