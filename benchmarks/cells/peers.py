"""Other libraries at their best documented settings: `benchmarks.peers` says what each does."""

import asyncio
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import asyncpg

from benchmarks.cells.round import Backlog, Round, Trial
from benchmarks.drain import INBOX, ROOT, Program, drain
from benchmarks.measure import Sample
from benchmarks.orders import KEYS
from benchmarks.stage import Stage, messages, random_keys
from towpath.testing.services.processes import make_cached

REQUIREMENTS: Final = ROOT / "benchmarks" / "peers.txt"


@dataclass(frozen=True)
class Peer:
    """A library."""

    name: str
    module: str
    done: str
    """Selects id and finished_at."""
    broker: Callable[[Stage], str] | None
    sizes: tuple[int, int]
    workers: int = 1
    """Processes; those that start several themselves need one."""


def _kafka(stage: Stage) -> str:
    return stage.kafka.bootstrap


def _rabbit(stage: Stage) -> str:
    return stage.rabbit.url


PEERS = (
    Peer(
        "procrastinate",
        "procrastinate_jobs",
        "select (j.args->>'id')::uuid as id, e.at as finished_at from procrastinate_jobs j"
        " join procrastinate_events e on e.job_id = j.id and e.type = 'succeeded'"
        " where j.status = 'succeeded'",
        None,
        (4_000, 300),
        workers=2,
    ),
    Peer(
        "pgqueuer",
        "pgqueuer_jobs",
        "select p.id, l.created as finished_at from pgqueuer_log l join public.produced p using (job_id)"
        " where l.status = 'successful'",
        None,
        (50_000, 3_000),
    ),
    Peer("faststream + inbox", "faststream_inbox", INBOX, _kafka, (20_000, 1_000)),
    Peer("dramatiq + inbox", "dramatiq_inbox", INBOX, _rabbit, (20_000, 1_000)),
    Peer("celery + inbox", "celery_inbox", INBOX, _rabbit, (20_000, 1_000)),
)


@cache
def python_of_peers() -> str:
    """The interpreter of their environment, which is made when the locked versions are new."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"

    def make(target: Path) -> None:
        uv = str(Path(sys.executable).with_name("uv"))
        python = str(target / "bin" / "python")
        subprocess.run(
            [uv, "venv", "-q", "--allow-existing", "--python", sys.executable, str(target)], check=True
        )
        subprocess.run(
            [
                uv,
                "pip",
                "install",
                "-q",
                "--compile-bytecode",
                "--python",
                python,
                "--require-hashes",
                "-r",
                str(REQUIREMENTS),
            ],
            check=True,
        )

    return str(make_cached(f"benchmark-peers-{version}-{digest}", make) / "bin" / "python")


def trial_of(peer: Peer) -> Trial:
    """Fill its queue, run its worker until everything is done, verify."""

    async def trial(round_: Round) -> Sample:
        stage, count = round_.stage, round_.size(*peer.sizes)
        backlog = await round_.backlog("peer", count) if peer.broker is _kafka else None
        if backlog is None:
            backlog = Backlog(stage.fresh_name("peer"), messages(count, random_keys(KEYS)))
        async with stage.database() as url:
            connection = await asyncpg.connect(url)
            await connection.execute("insert into public.produced select unnest($1::uuid[])", backlog.ids)
            await connection.close()
            environment = {
                "PEER_DATABASE": url,
                "PEER_BROKER": peer.broker(stage) if peer.broker else "",
                "PEER_NAME": backlog.topic,
                "PYTHONWARNINGS": "ignore",
            }
            python = await asyncio.to_thread(python_of_peers)

            def program(verb: str) -> Program:
                return Program(["-m", f"benchmarks.peers.{peer.module}", verb], environment, python)

            filling = await program("fill").start(asyncio.subprocess.PIPE)
            printed, _ = await filling.communicate()
            if filling.returncode or json.loads(printed) != {"produced": count}:
                return _failed(f"filling failed: {printed.decode().strip()}")
            programs = {"worker": program("work")}
            programs |= {f"worker {number}": program("work") for number in range(2, peer.workers + 1)}
            others: dict[str, Any] = {"rabbitmq": stage.rabbit.pid} if peer.broker is _rabbit else {}
            return await drain(stage, url, programs, peer.done, backlog.ids, others=others)

    return trial


def _failed(note: str) -> Sample:
    return Sample(0.0, {}, None, None, is_void=True, note=note)


TRIALS = {peer.name: trial_of(peer) for peer in PEERS}
WITH_A_BROKER = tuple(peer.name for peer in PEERS if peer.broker)
