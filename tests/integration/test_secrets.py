"""Canaries in every secret and every payload, everything made to fail, and then nothing of them anywhere."""

import json
from pathlib import Path
from typing import Any
from uuid import uuid4

import asyncpg
import pytest

from tests.fixtures.fix_cli import Run
from tests.integration.deployables import deployed, until
from tests.integration.relaying import emit
from towpath.brokers.factory import broker_from_url
from towpath.brokers.ports import GroupTopology

SECRETS = {
    name: f"c4n4ry-{name}"
    for name in ("database", "broker", "otlp", "payload", "header", "handler", "undecodable")
}

APP = """
from dataclasses import dataclass
import pydantic
from sqlalchemy.exc import IntegrityError
from towpath import App, Dead, RetryPolicy, event

@event("order.placed", destination="{address}")
@dataclass
class Rung:
    how: str
    text: str

class Strict(pydantic.BaseModel):
    number: int

class Violated(Exception):
    sqlstate = "23505"

app = App("{address}", retry=RetryPolicy(attempts=1))

@app.idempotent()
async def hear(bell: Rung) -> None:
    match bell.how:
        case "login":
            raise RuntimeError(f"no login with password={{bell.text}} at postgresql://app:{{bell.text}}@db/x")
        case "bearer":
            raise Dead("refused", f"Authorization: Bearer {{bell.text}}")
        case "group":
            both = [ValueError(f"api_key={{bell.text}}"), OSError(f"token: {{bell.text}}")]
            raise ExceptionGroup("calls", both)
        case "validation":
            Strict.model_validate({{"number": bell.text}})
        case "database":
            detail = Violated(f"duplicate key\\nDETAIL:  Key (name)=({{bell.text}}) already exists.")
            raise IntegrityError("insert into t values (:name)", {{"name": bell.text}}, detail)
"""
HOWS = ("login", "bearer", "group", "validation", "database")
REASONS = """
select to_jsonb(t) - 'headers' - 'result' - 'payload' from towpath.task t
union all select to_jsonb(e) from towpath.task_event e
union all select to_jsonb(d) - 'headers' - 'payload' from towpath.dead_letter d
union all select to_jsonb(a) from towpath.audit a
union all select to_jsonb(g) from towpath.publish_gate g
"""


def assert_clean(where: str, text: str) -> None:
    assert text, where
    found = {
        name: text[max(0, text.index(value) - 200) :][:400]
        for name, value in SECRETS.items()
        if value in text
    }
    assert found == {}, where


async def test_no_secret_is_in_anything_a_process_says(
    migrated_url: str, rabbit_url: str, db: "asyncpg.Connection[Any]", tmp_path: Path
) -> None:
    """X3: logs, spans, metrics, probes and the catalog's texts, while logins, handlers and exports fail."""
    address = f"bells-{uuid4().hex[:8]}"
    admin = broker_from_url(rabbit_url).admin()
    await admin.apply([address], [GroupTopology(address, (address,))], partitions=1)
    await admin.aclose()
    (tmp_path / "bells.py").write_text(APP.format(address=address))
    environment = {
        "TOWPATH_DATABASE_URL": migrated_url.replace("@", f":{SECRETS['database']}@", 1),
        "TOWPATH_BROKER_URL": rabbit_url,
        "TOWPATH_TELEMETRY__LOG_LEVEL": "DEBUG",
        "OTEL_TRACES_EXPORTER": "otlp,file",
        "TOWPATH_TELEMETRY__TRACES_FILE": str(tmp_path / "spans.jsonl"),
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer {SECRETS['otlp']}",
        "OTEL_METRICS_EXPORTER": "prometheus",
    }
    assert SECRETS["database"] in environment["TOWPATH_DATABASE_URL"]
    locked_out = {"TOWPATH_BROKER_URL": rabbit_url.replace(":guest@", f":{SECRETS['broker']}@", 1)}
    headers = json.dumps([["authorization", f"Bearer {SECRETS['header']}"]])
    for how in HOWS:
        body = {"how": how, "text": SECRETS["handler"], "more": SECRETS["payload"]}
        await emit(db, None, json.dumps(body).encode(), destination=address, headers=headers)
    for body in (b'{"how": 1, "text": ["%s"]}', b'{"how": "%s'):
        await emit(db, None, body % SECRETS["undecodable"].encode(), destination=address, headers=headers)

    async with deployed("relay", tmp_path, environment | locked_out) as relay:
        problem = await relay.until_problem("broker: ")
        for path in ("/readyz", "/metrics", "/livez"):
            assert_clean(path, (await relay.get(path))[1])
        assert_clean("the relay's problem", problem)
        assert_clean("the locked out relay's log", relay.log)
    async with (
        deployed("relay", tmp_path, environment),
        deployed("worker", tmp_path, environment, "bells:app") as worker,
    ):
        count = "select count(*) from towpath.dead_letter"

        async def all_are_dead() -> bool:
            return bool(await db.fetchval(count) == len(HOWS) + 2)

        await until("dead letters", all_are_dead)
        await until("spans", lambda: _has(tmp_path / "spans.jsonl", "process"))
        for path in ("/readyz", "/metrics"):
            assert_clean(path, (await worker.get(path))[1])
        assert_clean("the worker's log", worker.log)
    assert_clean("the relay's log", (tmp_path / "relay.log").read_text())
    assert_clean("spans", (tmp_path / "spans.jsonl").read_text())
    rows = [row[0] for row in await db.fetch(REASONS)]
    assert_clean("the catalog's texts", "\n".join(rows))


async def _has(path: Path, text: str) -> bool:
    return path.exists() and text in path.read_text()


@pytest.mark.parametrize(
    "variables",
    [
        {"DATABASE_URL": f"postgresql://app:{SECRETS['database']}@127.0.0.1:1/x"},
        {"DATABASE_URL": f"postgresql://127.0.0.1:1/x?user=app&password={SECRETS['database']}"},
        {"DATABASE_URL": f"postgresql://app:{SECRETS['database']}/y@127.0.0.1:1/x"},
        {"DATABASE_URL": f"app:{SECRETS['database']}@127.0.0.1"},
        {"DATABASE_URL": f"postgresql://127.0.0.1:1/x?no_such_option={SECRETS['database']}"},
        {"BROKER_URL": f"amqp://app:{SECRETS['broker']}@127.0.0.1:1/"},
        {"BROKER_URL": f"kafka://app:{SECRETS['broker']}@127.0.0.1:1"},
        {"BROKER_URL": f"kafka://app:{SECRETS['broker']}/x@127.0.0.1:1"},
        {"BROKER_URL": f"kafka://app:{SECRETS['broker']}@broker.example:9092"},
        {"BROKER_URL": f"amqp://app:{SECRETS['broker']}@broker.example/"},
        {"BROKER_OPTIONS": f'{{"sasl_plain_password": "{SECRETS["broker"]}", "sasl_mechanism": "NONE"}}'},
        {"BROKER_OPTIONS": f'{{"no_such_option": "{SECRETS["broker"]}"}}'},
        {"BROKER_OPTIONS": f'"{SECRETS["broker"]}"'},
        {"BROKER_OPTIONS": f'{{"sasl_plain_password": "{SECRETS["broker"]}'},
    ],
    ids=str,
)
def test_no_secret_is_in_what_a_command_prints_when_it_fails(
    towpath: Run, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    """X3: not with a traceback either."""
    for name, value in variables.items():
        monkeypatch.setenv(f"TOWPATH_{name}", value)
    for arguments in (("db", "current"), ("broker", "check", "--address", "orders"), ("config", "show")):
        ran = towpath("-vv", *arguments)
        assert_clean(" ".join(arguments), f"{ran.code}{ran.out}{ran.err}")
