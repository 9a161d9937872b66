"""`towpath config show`: complete, and no secret in it."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from towpath import settings
from towpath.cli.config import masked_url
from towpath.cli.root import run

CANARY = "s3cr3t-canary"


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What the command prints under the given variables, in both forms."""
    for name in list(os.environ):
        if name.upper().startswith("TOWPATH_"):
            monkeypatch.delenv(name)

    def command(**variables: str) -> str:
        for name, value in variables.items():
            monkeypatch.setenv(f"TOWPATH_{name}", value)
        codes = run(["config", "show"]), run(["config", "show", "--json"])
        out, err = capsys.readouterr()
        assert (codes, err) == ((0, 0), "")
        return out

    return command


@pytest.mark.parametrize(
    "url",
    [
        f"postgresql://app:{CANARY}@db:5432/orders",
        f"postgresql://app:{CANARY}%40x@db/orders",
        f"postgresql://app:x@y@{CANARY}@db/orders",
        f"postgresql://app@db/orders?password={CANARY}",
        f"postgresql://db/orders?sslmode=require&password=p@{CANARY}",
        f"postgresql://app:pw@db/orders?sslpassword={CANARY}&{CANARY}",
        f"postgresql://app:{CANARY}:{CANARY}@db/orders",
    ],
)
def test_no_password_of_a_database_url_is_shown(show: Callable[..., str], url: str) -> None:
    """X3"""
    assert CANARY not in show(DATABASE_URL=url)


def test_no_secret_of_the_broker_is_shown(show: Callable[..., str]) -> None:
    """X3"""
    options = {
        "sasl_plain_password": CANARY,
        "sasl_plain_username": CANARY,
        "nested": {"token": CANARY},
        "listed": [CANARY],
        "acks": "all",
        "linger_ms": 5,
        "check_crcs": False,
    }
    text = show(
        DATABASE_URL="postgresql://db/orders",
        BROKER_URL=f"amqps://app:{CANARY}@mq:5671/?auth={CANARY}",
        BROKER_OPTIONS=json.dumps(options),
        BROKER_OPTIONS__SSL_PASSWORD=CANARY,
    )

    assert CANARY not in text
    assert "amqps://app:***@mq:5671/?auth=***" in text
    assert "acks=all linger_ms=5 check_crcs=false" in text


def test_every_setting_is_shown_with_its_variable(show: Callable[..., str]) -> None:
    text = show(DATABASE_URL="postgresql://app@db/orders", RELAY__POLL_MAX="1m")

    for name in settings.variables():
        assert f"\n{name} " in f"\n{text}"
        assert f'"{name}":' in text
    assert "TOWPATH_RELAY__POLL_MAX" in text
    assert '"TOWPATH_RELAY__POLL_MAX": "1m"' in text
    assert [line.split()[1] for line in text.splitlines() if "CANARIES" in line] == ["true", "true,"]
    assert "postgresql://app@db/orders" in text


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("kafka://a:9092,b:9092", "kafka://a:9092,b:9092"),
        ("amqp://guest:guest@mq/", "amqp://guest:***@mq/"),
        ("postgresql://u@h/d?sslmode=require&x=y&z", "postgresql://u@h/d?sslmode=require&x=***&***"),
        ("postgresql://u:p/w@h/d", "postgresql://***"),
        ("nonsense", "***"),
    ],
)
def test_a_url_keeps_what_helps_and_loses_what_is_secret(url: str, expected: str) -> None:
    """X3"""
    assert masked_url(url) == expected


def test_the_command_line_wins_over_the_environment_and_the_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "towpath.toml"
    file.write_text('database_url = "postgresql://localhost/x"\n[relay]\nlease = "1m"\nmargin = "2s"')
    monkeypatch.setenv("TOWPATH_RELAY__LEASE", "2m")
    before = dict(os.environ)

    code = run(["--config-file", str(file), "--set", "TOWPATH_RELAY__LEASE=3m", "config", "show", "--json"])

    rows = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (rows["TOWPATH_RELAY__LEASE"], rows["TOWPATH_RELAY__MARGIN"]) == ("3m", "2s")
    assert rows["TOWPATH_SCHEMA_NAME"] == "towpath"
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("TOWPATH_RELAY__LEASE", "--set is VARIABLE=VALUE, such as TOWPATH_RELAY__LEASE=1m"),
        ("PATH=/tmp", "--set is VARIABLE=VALUE"),
        ("TOWPATH_RELAY__LEESE=1m", "did you mean TOWPATH_RELAY__LEASE?"),
    ],
)
def test_a_setting_on_the_command_line_that_is_none_is_refused(
    capsys: pytest.CaptureFixture[str], given: str, complaint: str
) -> None:
    """O2"""
    assert run(["--set", given, "config", "show"]) == 2
    assert complaint in capsys.readouterr().err


def test_the_schema_of_the_settings_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == settings.json_schema()
