"""What the Dockerfiles describe, built and started in clean directories, without a container engine."""

import asyncio
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import asyncpg
import pytest

from tests.fixtures.graveyard import bury
from towpath.settings import variables
from towpath.testing.services.ports import ReservedPort

ROOT = Path(__file__).parents[2]
IMAGES = ("outbox_relay", "consumers")
IGNORED = shutil.ignore_patterns("__pycache__")  # by .dockerignore too


@dataclass(frozen=True)
class Image:
    """The final stage of a Dockerfile."""

    environment: Mapping[str, str]
    copied: tuple[str, ...]
    command: tuple[str, ...]
    health_check: tuple[str, ...]
    text: str


def read(name: str) -> Image:
    """The instructions that matter, from the last FROM on."""
    text = (ROOT / name / "Dockerfile").read_text()
    last = "\nFROM" + text.rpartition("\nFROM")[2].replace("\\\n", " ")
    commands = [tuple(json.loads(words)) for words in re.findall(r"CMD (\[.*\])", last)]
    (environment,) = re.findall(r"\nENV (.*)", last)
    return Image(
        dict(pair.split("=", 1) for pair in environment.split()),
        tuple(re.findall(r"\nCOPY (\S+) /app/", last)),
        commands[1],
        commands[0],
        last,
    )


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


class Container:
    """One process in the image's directory and environment, and nothing of the repository's."""

    def __init__(self, image: Image, prefix: Path, directory: Path, environment: Mapping[str, str]) -> None:
        for name in image.copied:
            shutil.copytree(ROOT / name, directory / name, ignore=IGNORED)
        self._directory = directory
        self._environment = {
            **image.environment,
            **environment,
            "PATH": f"{prefix / 'bin'}:/usr/bin:/bin",
            "HOME": "/nonexistent",
        }

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """As `docker exec`."""
        return subprocess.run(
            self._words(words),
            env=self._environment,
            cwd=self._directory,
            capture_output=True,
            text=True,
            check=False,
        )

    def start(self, *words: str) -> subprocess.Popen[str]:
        """As `docker run`."""
        return subprocess.Popen(
            self._words(words), env=self._environment, cwd=self._directory, stderr=subprocess.PIPE, text=True
        )

    def _words(self, words: tuple[str, ...]) -> list[str]:
        program = shutil.which(words[0], path=self._environment["PATH"])
        assert program is not None, f"{words[0]} is not in the image"
        return [program, *words[1:]]


@pytest.fixture
def port() -> Iterator[int]:
    reserved = ReservedPort()
    yield reserved.number
    reserved.release()


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [("outbox_relay", ()), ("consumers", ("python", "-m", "consumers", "run", "orders"))],
)
def test_an_image_starts_is_healthy_and_drains(
    prefix: Path, migrated_url: str, tmp_path: Path, port: int, name: str, arguments: tuple[str, ...]
) -> None:
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
    process = container.start(*(arguments or image.command))
    try:
        deadline = time.monotonic() + 60
        while (healthy := container.run(*image.health_check)).returncode and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()

    assert healthy.returncode == 0, healthy.stderr + log
    assert process.returncode == 0, log
    assert "service.stopped" in log
    assert container.run(*image.health_check).returncode == 4
    assert container.run("towpath", "dlq", "summary").returncode == 0
    assert not list(tmp_path.rglob("__pycache__")), "a read-only root would refuse it"


async def _bury(url: str) -> None:
    db = await asyncpg.connect(url)
    await bury(db, ["k1", "k2"])
    await db.close()


def test_the_command_of_an_image_replays_without_a_terminal(
    prefix: Path, migrated_url: str, tmp_path: Path
) -> None:
    """D3, O1: as `docker run … towpath dlq replay --group billing --yes`."""
    asyncio.run(_bury(migrated_url))
    environment = {"TOWPATH_DATABASE_URL": migrated_url}
    container = Container(read("outbox_relay"), prefix, tmp_path, environment)

    unsaid = container.run("towpath", "dlq", "replay", "--group", "billing")
    ran = container.run("towpath", "dlq", "replay", "--group", "billing", "--yes")
    again = container.run("towpath", "dlq", "replay", "--group", "billing", "--yes")

    assert (unsaid.returncode, "add --yes" in unsaid.stderr) == (2, True)
    assert (ran.returncode, "replayed 2" in ran.stdout) == (0, True), ran.stdout + ran.stderr
    assert (again.returncode, "nothing to do" in again.stdout) == (0, True), again.stdout + again.stderr


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_is_small_labelled_and_runs_as_nobody(name: str) -> None:
    image = read(name)
    text = (ROOT / name / "Dockerfile").read_text()
    assert len(re.findall(r"^FROM ", text, re.MULTILINE)) == 2, "build tools stay in a stage of their own"
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", image.text, re.MULTILINE)
    assert 'LABEL org.opencontainers.image.title="' in image.text
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
