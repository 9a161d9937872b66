"""What the Dockerfiles describe, built and started in clean directories, without a container engine."""

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import asyncpg
import psycopg
import pytest

from tests.docs.pages import blocks, commands
from tests.docs.test_operations import is_as_shown
from tests.fixtures.graveyard import bury
from tests.fixtures.images import IGNORED, IMAGES, ROOT, Container, namespace, read
from towpath.settings import variables
from towpath.store.installed import library_version
from towpath.testing.services.ports import ReservedPort

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library as the build stage installs it, from a copy of the build context."""
    assert "**/__pycache__" in (ROOT / ".dockerignore").read_text().splitlines()
    context = tmp_path_factory.mktemp("context")
    for name in (ROOT / ".dockerignore").read_text().splitlines():
        if name.startswith("!") and name[1:] not in IMAGES:
            source = ROOT / name[1:]
            if source.is_dir():
                shutil.copytree(source, context / name[1:], ignore=IGNORED)
            else:
                shutil.copy2(source, context / name[1:])
    target = tmp_path_factory.mktemp("opt") / "towpath"
    done = subprocess.run(
        ["requirements/install.sh", target], cwd=context, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def port() -> Iterator[int]:
    reserved = ReservedPort()
    yield reserved.number
    reserved.release()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [("outbox_relay", ()), ("consumers", ("python", "-m", "consumers", "run", "orders"))],
)
def test_an_image_starts_is_healthy_and_drains(
    prefix: Path, migrated_url: str, tmp_path: Path, port: int, name: str, arguments: tuple[str, ...]
) -> None:
    """S4: as process 1, where the kernel drops what nobody handles, beside a child that nobody waits for.

    On a read-only root.
    """
    image = read(name)
    noun = image.health_check[1]
    container = Container(
        image,
        prefix,
        tmp_path,
        {
            "TOWPATH_DATABASE_URL": migrated_url,
            "TOWPATH_BROKER_URL": "memory://image",
            f"TOWPATH_{noun.upper()}__HEALTH_PORT": str(port),
        },
    )
    with container.started(tmp_path / "log", *(arguments or image.command)) as process:
        deadline = time.monotonic() + 180
        while (healthy := container.run(*image.health_check)).returncode and time.monotonic() < deadline:
            time.sleep(0.2)
        assert healthy.returncode == 0, healthy.stderr + process.log
        process.leave_an_orphan()
        assert process.is_process_1 is bool(namespace()[0])
        process.signal(signal.SIGTERM)
        assert process.exit_code() == 0, process.log

    assert "service.stopped" in process.log
    assert container.run(*image.health_check).returncode == 4
    assert container.run("towpath", "dlq", "summary").returncode == 0
    assert not list(tmp_path.rglob("__pycache__")), "a read-only root would refuse it"
    say_if_weaker()


def say_if_weaker() -> None:
    """A test that had no process 1 does not pass unnoticed."""
    words, why = namespace()
    if not words:
        pytest.skip(f"signals were right, but not as process 1 on a read-only root: {why}")


_INVOICE_REQUESTED = """
insert into towpath.task (consumer_group, id, type, kind, source, state, held_by, due_at, waiting_for,
                          payload, content_type)
values ('orders', %s, 'invoice.requested', 'event', 'invoices', 'WAITING', 'database', towpath.clock(),
        'retry', '{"order_id": "o-1", "amount": 5}', 'application/json')
"""


def _is_running(db: "psycopg.Connection[tuple[str]]") -> bool:
    row = db.execute("select state from towpath.task").fetchone()
    return row is not None and row[0] == "RUNNING"


def test_a_second_signal_ends_process_1_at_once(prefix: Path, migrated_url: str, tmp_path: Path) -> None:
    """S4: whatever its handlers do; the first one waits for them."""
    environment = {
        "TOWPATH_DATABASE_URL": migrated_url,
        "TOWPATH_BROKER_URL": "memory://image",
        "TOWPATH_WORKER__DRAIN_TIMEOUT": "10m",
        "TOWPATH_WORKER__HEALTH_PORT": "0",
    }
    container = Container(read("consumers"), prefix, tmp_path, environment)
    made = container.run("python", "-m", "consumers", "init", "orders")
    assert made.returncode == 0, made.stderr
    with psycopg.connect(migrated_url) as locking, psycopg.connect(migrated_url, autocommit=True) as db:
        locking.execute("lock table invoice")  # so the handler does not end
        db.execute(_INVOICE_REQUESTED, [uuid4()])
        with container.started(tmp_path / "log", "python", "-m", "consumers", "run", "orders") as process:
            process.until("a handler that runs", lambda: _is_running(db))
            process.signal(signal.SIGTERM)
            process.logged("service.draining")
            process.signal(signal.SIGINT)
            assert process.exit_code() == 128 + signal.SIGINT, process.log
    assert "service.stopped" not in process.log
    say_if_weaker()


async def _bury(url: str, count: int = 2) -> None:
    db = await asyncpg.connect(url)
    await bury(db, [f"k{number}" for number in range(count)])
    await db.close()


def test_a_command_that_is_process_1_is_interrupted_by_a_signal(
    prefix: Path, migrated_url: str, tmp_path: Path
) -> None:
    """S4, D3: `docker stop` and the end of a Job need not wait for the kill; run again it goes on."""
    asyncio.run(_bury(migrated_url, 300))
    container = Container(read("outbox_relay"), prefix, tmp_path, {"TOWPATH_DATABASE_URL": migrated_url})
    replay = ("towpath", "dlq", "replay", "--all", "--yes")

    with (
        psycopg.connect(migrated_url, autocommit=True) as db,
        container.started(tmp_path / "log", *replay, "--rate", "1") as process,
    ):
        process.until("a first one", lambda: db.execute("select from towpath.audit").rowcount >= 1)
        process.signal(signal.SIGTERM)
        assert process.exit_code() == 130, process.log
    rest = container.run(*replay)

    assert (rest.returncode, "going on with what was interrupted" in rest.stdout) == (0, True), rest
    say_if_weaker()


_SLOW = "import time\nprint('loading', flush=True)\ntime.sleep(600)\n"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("outbox_relay", ("python", "-m", "outbox_relay")),
        ("outbox_relay", ("towpath", "dlq", "replay", "--all", "--yes")),
        ("consumers", ("python", "-m", "consumers", "run", "orders")),
    ],
)
def test_a_signal_ends_process_1_while_it_loads(
    prefix: Path, tmp_path: Path, name: str, words: tuple[str, ...]
) -> None:
    """S4: whichever of what it is made of is loaded first takes its time."""
    for package in ("asyncpg", "msgspec", "opentelemetry", "pydantic", "sqlalchemy", "typer"):
        (tmp_path / f"{package}.py").write_text(_SLOW)
    container = Container(read(name), prefix, tmp_path, {"PYTHONPATH": str(tmp_path)})
    with container.started(tmp_path / "log", *words) as process:
        process.logged("loading")
        process.signal(signal.SIGTERM)
        assert process.exit_code() == 128 + signal.SIGTERM, process.log
    assert process.log == "loading\n"
    say_if_weaker()


@pytest.fixture
def docker(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a `docker` that runs what an image would."""
    directory = tmp_path_factory.mktemp("bin")
    program = directory / "docker"
    command = f'{sys.executable} -m tests.deployment.container_engine --prefix {prefix} "$@"'
    program.write_text(f"#!/bin/sh\nPYTHONPATH={ROOT} exec {command}\n")
    program.chmod(0o755)
    return directory


def test_the_command_of_an_image_replays_without_a_terminal(
    docker: Path, migrated_url: str, tmp_path: Path
) -> None:
    """D3, O1: the blocks of docs/deploying.md."""
    asyncio.run(_bury(migrated_url))
    (tmp_path / "operator.env").write_text(f"TOWPATH_DATABASE_URL={migrated_url}\n")
    environment = {"PATH": f"{docker}:{os.environ['PATH']}"}

    def run(line: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            line, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    [block] = [block for block in blocks("docs/deploying.md") if block.language == "console"]
    [(line, shown)] = commands(block.text)
    unsaid, ran, again = run(line.replace(" --yes", "")), run(line), run(line)

    assert (unsaid.returncode, "add --yes" in unsaid.stderr) == (2, True), unsaid
    assert (ran.returncode, ran.stderr) == (0, "")
    assert is_as_shown(shown, ran.stdout), ran.stdout
    assert (again.returncode, "nothing to do" in again.stdout) == (0, True), again


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_small_labelled_and_runs_as_nobody(name: str) -> None:
    image = read(name)
    text = (ROOT / name / "Dockerfile").read_text()
    assert len(re.findall(r"^FROM ", text, re.MULTILINE)) == 2, "build tools stay in a stage of their own"
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", image.text, re.MULTILINE)
    assert 'LABEL org.opencontainers.image.title="' in image.text
    assert f'org.opencontainers.image.version="{library_version()}"' in image.text
    assert "ENTRYPOINT" not in image.text, "`docker run IMAGE towpath …` must be the command line"
    settings = {key for key in image.environment if key.startswith("TOWPATH_")}
    assert settings <= set(variables())


def test_everything_installed_is_compiled(prefix: Path) -> None:
    """On a read-only file system each start of a process, each health check too, would compile it anew."""
    (library,) = prefix.glob("lib/python3.*/site-packages")
    sources = [*library.glob("towpath/**/*.py"), *library.glob("sqlalchemy/**/*.py")]
    assert len(sources) > 300
    for source in sources:
        compiled = [*(source.parent / "__pycache__").glob(f"{source.stem}.*.pyc")]
        assert compiled, f"{source} is compiled at every start"


def test_the_images_install_the_same_way() -> None:
    stages = {(ROOT / name / "Dockerfile").read_text().split("FROM ")[1] for name in IMAGES}
    assert len(stages) == 1


def test_the_build_context_is_what_the_stages_copy() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = set[str]()
    for name in IMAGES:
        for line in (ROOT / name / "Dockerfile").read_text().splitlines():
            if line.startswith("COPY ") and "--from" not in line:
                copied.update(line.split()[1:-1])
    assert copied == allowed
    assert all((ROOT / name).exists() for name in allowed)
