"""A10: the demo keeps its promises, finds planted defects by itself, and leaves nothing behind."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import asyncpg
import psutil
import pytest

from examples.demo import check, findings, promises
from examples.demo.defects import DEFECTS
from tests.docs.pages import blocks, matches

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

REPOSITORY: Final = Path(__file__).parents[2]
DEADLINE_SECONDS: Final = 480
FOUND_BY: Final[Mapping[str, str]] = {
    "lost_message": "every committed message reached its end",
    "lost_effect": "each effect is there exactly once",
    "doubled_effect": "each effect is there exactly once",
    "doubled_invoice": "each paid order is billed exactly once",
    "order_inversion": "effects of one key came in commit order",
    "task_without_end": "every committed message reached its end",
    "wrong_end": "every committed message reached its end",
    "task_that_nobody_committed": "nothing that was rolled back exists, nor anything else",
    "effect_that_nobody_committed": "nothing that was rolled back exists, nor anything else",
    "dead_letter_left_open": "what died was replayed, and nothing else had died",
    "business_row_without_message": "the business tables tell the same story",
}


class Demo:
    """The demo as a process of its own, with what it prints and everything it starts."""

    def __init__(self, output: Path, *arguments: str) -> None:
        self._output = output
        environment = {name: value for name, value in os.environ.items() if name not in ("KEEP", "BROKER")}
        with output.open("w") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "examples.demo", *arguments],
                cwd=REPOSITORY,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._family: dict[int, psutil.Process] = {}

    @property
    def printed(self) -> str:
        return self._output.read_text()

    def wait_for(self, text: str) -> None:
        """Until it has printed this. Fails when it ends before, or is too slow."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while text not in self.printed:
            assert self._process.poll() is None, self.printed
            assert time.monotonic() < deadline, self.printed
            self._look_around()
            time.sleep(0.1)

    def interrupt(self) -> None:
        """What Ctrl-C does."""
        self._look_around()
        self._process.send_signal(signal.SIGINT)

    def exit_code(self) -> int:
        """How it ended."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self._process.poll() is None:
            assert time.monotonic() < deadline, self.printed
            self._look_around()
            time.sleep(0.1)
        return self._process.returncode

    def survivors(self) -> list[psutil.Process]:
        """What it started and did not end."""
        _, alive = psutil.wait_procs(self._family.values(), timeout=120)
        return alive

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _look_around(self) -> None:
        if psutil.pid_exists(self._process.pid):
            found = psutil.Process(self._process.pid).children(recursive=True)
            self._family.update({process.pid: process for process in found})


@dataclass(frozen=True)
class Finished:
    """A demo that has passed its check and is left running."""

    database_url: str
    made: promises.Promises
    printed: str


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    demo = Demo(tmp_path_factory.mktemp("demo") / "output.txt", "--keep")
    try:
        demo.wait_for("left running until Ctrl-C")
        demo.wait_for("examples.demo.producing")
        assert "every promise was kept" in demo.printed, demo.printed
        logs = _address(demo.printed, "logs")
        made = promises.read(Path(logs).with_name("promises.json"))
        yield Finished(_address(demo.printed, "Postgres"), made, demo.printed)
        assert "committed 500 messages" in _try(demo.printed, "producing")
        demo.interrupt()
        assert demo.exit_code() == 0, demo.printed
        assert demo.survivors() == []
        assert not Path(logs).parent.exists()
    finally:
        demo.kill()


def _try(printed: str, command: str) -> str:
    """Do as the demo says: read its settings into a shell, then run the command that has these words."""
    (settings,) = re.findall(r"first:\s+(\. \S+)$", printed, re.MULTILINE)
    (line,) = [line.strip() for line in printed.partition("first:")[2].splitlines() if command in line]
    done = subprocess.run(
        ["bash", "-ec", f"{settings}\n{line}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=DEADLINE_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _address(printed: str, name: str) -> str:
    match = re.search(rf"^\s+{name}\s+(\S+)$", printed, re.MULTILINE)
    assert match is not None, printed
    return match[1]


def test_the_demo_prints_the_verdict_that_the_readme_shows(finished: Finished) -> None:
    (shown,) = [block.text for block in blocks("README.md") if block.text.startswith("ok  ")]
    printed = [line for line in finished.printed.splitlines() if line.lstrip().startswith(("ok  ", "NO  "))]
    assert matches(shown, "\n".join(printed)), printed


@pytest.mark.parametrize(("command", "shows"), [("tasks list", "SUCCEEDED"), ("dlq list", "http_503")])
def test_the_commands_it_offers_work_in_another_shell(finished: Finished, command: str, shows: str) -> None:
    assert shows in _try(finished.printed, command)


async def test_the_demo_commits_what_it_says_and_passes_its_own_check(finished: Finished) -> None:
    connection = await asyncpg.connect(finished.database_url)
    try:
        claims = await check.check(connection, finished.made)
    finally:
        await connection.close()
    assert [problem for claim in claims for problem in claim.problems] == []
    groups = [promise.group for promise in finished.made.committed]
    assert (groups.count("agents"), groups.count("orders")) == (200, 300)
    assert finished.made.rolled_back_count > 0


@pytest.mark.parametrize("defect", sorted(DEFECTS))
async def test_the_check_finds_a_planted_defect(finished: Finished, defect: str) -> None:
    """A10."""
    connection = await asyncpg.connect(finished.database_url)
    try:
        claims = await _judge_with(connection, defect, finished.made)
    finally:
        await connection.close()
    assert FOUND_BY[defect] in [claim.text for claim in claims if not claim.is_true]


async def _judge_with(
    connection: "asyncpg.Connection[Any]", defect: str, made: promises.Promises
) -> list[check.Claim]:
    transaction = connection.transaction()
    await transaction.start()
    try:
        status = await connection.execute(DEFECTS[defect])
        assert not status.endswith(" 0"), "the defect changed nothing"
        return check.judge(await findings.read(connection), made)
    finally:
        await transaction.rollback()


def test_the_demo_fails_and_stops_everything_when_its_check_does(tmp_path: Path) -> None:
    """A10: the exit code tells, and nothing is left running; on RabbitMQ the rest is as promised."""
    demo = Demo(tmp_path / "output.txt", "--broker", "rabbitmq", "--plant", "doubled_effect")
    try:
        assert demo.exit_code() == 1, demo.printed
        assert "RabbitMQ on " in demo.printed
        assert "took effect 2 times, not 1" in demo.printed
        no, ok = ({*re.findall(rf"{word}  ([^:]+):", demo.printed)} for word in ("NO", "ok"))
        twice, again = FOUND_BY["doubled_effect"], FOUND_BY["order_inversion"]
        assert twice in no <= {twice, again}, "what comes again comes behind later ones, if it has any"
        assert ok == {*FOUND_BY.values()} - no, demo.printed
        assert "NOT every promise was kept" in demo.printed
        assert demo.survivors() == []
    finally:
        demo.kill()


def test_the_demo_keeps_every_promise_on_kafka(tmp_path: Path) -> None:
    """A10"""
    demo = Demo(tmp_path / "output.txt", "--broker", "kafka")
    try:
        assert demo.exit_code() == 0, demo.printed
        assert "Apache Kafka on " in demo.printed
        assert {*re.findall(r"ok  ([^:]+):", demo.printed)} == {*FOUND_BY.values()}
        assert "every promise was kept" in demo.printed
        assert demo.survivors() == []
    finally:
        demo.kill()


def test_ctrl_c_in_the_middle_stops_everything(tmp_path: Path) -> None:
    demo = Demo(tmp_path / "output.txt")
    try:
        demo.wait_for("started: relay")
        demo.interrupt()
        assert demo.exit_code() == 130, demo.printed
        assert demo.survivors() == []
    finally:
        demo.kill()
