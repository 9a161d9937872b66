"""`--json`: every command's document has the shape that is published beside the commands."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from jsonschema import Draft202012Validator

from tests.fixtures.fix_cli import Run
from tests.fixtures.graveyard import bury
from tests.fixtures.json_documents import SCHEMAS, check_document, json_commands, published
from towpath.brokers.factory import broker_from_url

COMMANDS = sorted(json_commands())
APP = "consumers.groups.orders.app:app"


def test_every_command_that_prints_json_has_a_schema_and_no_other_has() -> None:
    """O1: a new command needs one in `towpath/cli/schemas`."""
    assert sorted(json_commands()) == sorted(path.stem for path in SCHEMAS.glob("*.json"))


def objects(schema: Any) -> Iterator[Any]:
    """Every object that a schema describes."""
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        schema = list(schema.values())
    for each in schema if isinstance(schema, list) else ():
        yield from objects(each)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_schema_says_which_fields_there_are(name: str) -> None:
    schema = published(name)

    Draft202012Validator.check_schema(schema)
    assert schema["title"] == f"towpath {name.replace('.', ' ')} --json"
    for each in objects(schema):
        assert set(each["required"]) <= set(each["properties"])
        assert each["additionalProperties"] is False


async def fill(url: str) -> list[str]:
    db: asyncpg.Connection[Any] = await asyncpg.connect(url)
    ids = await bury(db, ["o-1", "o-2", None], has_body=True)
    await bury(db, ["p-1"], stage="publish")
    await db.execute("select towpath.emit('orders', 'order.placed', '{}', 'o-1')")
    waiting = await db.fetchval("select towpath.submit_task('billing', 'payment.charge', '{}')")
    delayed = "select towpath.emit('views', 'view.seen', '{}', due_at => now() + interval '1 hour')"
    await db.execute(delayed)
    await db.execute(
        "update towpath.task set updated_at = now() - interval '1 hour';"
        "insert into towpath.worker (id, consumer_group, host, lease_until)"
        " values (gen_random_uuid(), 'billing', 'here', now() + interval '1 hour');"
        "insert into towpath.relay (id, host) values (gen_random_uuid(), 'here');"
    )
    later = await db.fetchval("select message_id from towpath.scheduled")
    found = await db.fetchval("select id from towpath.task where state = 'ACCEPTED'")
    await db.close()
    assert waiting is not None
    return [str(found), str(later), *map(str, ids)]


def test_what_commands_print_has_the_published_shape(
    towpath: Run, migrated_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """O1: on a database with something to print."""
    import asyncio

    monkeypatch.setenv("TOWPATH_BROKER_URL", "memory://documents")
    broker = broker_from_url("memory://documents")  # it lasts as long as somebody holds it
    waiting, later, first, second, _ = asyncio.run(fill(migrated_url))
    body, exported = tmp_path / "body.json", tmp_path / "dead.jsonl"
    body.write_text("{}")
    exported.write_text(towpath("dlq", "export").out)
    lines = f"""
        doctor --app {APP}
        db current
        db check
        broker check --app {APP}
        broker apply --app {APP} --dry-run
        broker apply --app {APP}
        broker list
        broker add second
        destination set orders --on-poison park_key
        destination list
        destination unset orders
        outbox show {waiting}
        outbox show {later} --payload
        outbox show {first}
        outbox pause --destination orders --yes
        outbox status
        relay status
        outbox resume --all --yes
        outbox republish --since 1h --dry-run
        outbox rebase --to now --dry-run
        outbox confirm
        worker validate {APP}
        worker offsets --group orders
        worker pause --group billing --type payment.charge --yes
        worker status
        worker resume --group billing --yes
        tasks stuck --older-than 1m
        tasks retry --group billing --yes
        tasks rerun --group billing --all --dry-run
        tasks list
        tasks cancel {waiting} --group billing
        tasks show {waiting}
        tasks show {first}
        dlq summary
        dlq list
        dlq show {first}
        dlq edit {first} --payload {body} --force
        dlq show {first} --payload
        dlq import {exported} --yes
        dlq import {exported} --dry-run
        dlq replay --all --dry-run
        dlq discard --id {second} --yes
        dlq replay --id {first} --yes
        config show
    """
    for line in map(str.strip, lines.strip().splitlines()):
        ran = towpath(*line.split(), "--json")
        assert ran.code in (0, 3), (line, ran)
        check_document([*line.split(), "--json"], ran.out)
    assert broker
