"""python -m towpath.testing.services up | down | status | install"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from towpath.testing.services import (
    EmbeddedKafka,
    KafkaServer,
    PostgresServer,
    RabbitServer,
    ServiceAddress,
    ServiceFailed,
    ServiceMissing,
    faketime,
    kafka,
    pgbouncer,
    postgres,
    rabbitmq,
)
from towpath.testing.services.processes import Server, cache_directory

_SERVERS: dict[str, Callable[[], Server]] = {
    "postgres": PostgresServer,
    "kafka": KafkaServer,
    "embedded-kafka": EmbeddedKafka,
    "rabbitmq": RabbitServer,
}
_INSTALLERS: dict[str, Callable[[], object]] = {
    "postgres": postgres.install,
    "kafka": kafka.install,
    "rabbitmq": rabbitmq.install,
    "pgbouncer": pgbouncer.install,
    "distribution-postgres": postgres.distribution_programs,
    "faketime": faketime.install,
}
_DEFAULT = ("postgres", "kafka", "rabbitmq")
_VARIABLES = {
    "postgres": "TOWPATH_TEST_POSTGRES",
    "kafka": "TOWPATH_TEST_KAFKA",
    "embedded-kafka": "TOWPATH_TEST_KAFKA",
    "rabbitmq": "TOWPATH_TEST_RABBITMQ",
}


def _state_path() -> Path:
    return cache_directory() / "services.json"


def _start_time(pid: int) -> str | None:
    """Tells a process from a later one with the same pid; None when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _running_state() -> dict[str, Any] | None:
    try:
        state: dict[str, Any] = json.loads(_state_path().read_text())
    except FileNotFoundError:
        return None
    return state if _start_time(state["pid"]) == state["started"] else None


def _print(addresses: Sequence[ServiceAddress], output: str) -> None:
    for address in addresses:
        if output == "json":
            print(json.dumps({"name": address.name, "url": address.url}))
        else:
            print(f"export {_VARIABLES[address.name]}={address.url}")
    sys.stdout.flush()


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _serve(names: Sequence[str], output: str, state_path: Path | None) -> None:
    """Runs the servers until Ctrl-C or SIGTERM."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell's background job inherits SIGINT ignored
        signal.signal(number, _interrupt)
    with contextlib.ExitStack() as stack:
        addresses = [stack.enter_context(_SERVERS[name]()).address for name in names]
        with contextlib.suppress(KeyboardInterrupt):  # from the first line printed: they are up
            _print(addresses, output)
            if state_path is not None:
                stack.callback(state_path.unlink, missing_ok=True)
                _note_state(state_path, addresses)
            while True:
                signal.pause()


def _note_state(path: Path, addresses: Sequence[ServiceAddress]) -> None:
    state = {
        "pid": os.getpid(),
        "started": _start_time(os.getpid()),
        "addresses": [[address.name, address.url] for address in addresses],
    }
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps(state))
    scratch.rename(path)


def _up(arguments: argparse.Namespace) -> None:
    names = arguments.services or list(_DEFAULT)
    if not arguments.detach:
        _serve(names, arguments.output, arguments.state_file)
        return
    if _running_state() is not None:
        raise ServiceFailed("services are already up, see: python -m towpath.testing.services status")
    _state_path().unlink(missing_ok=True)
    with Path(cache_directory(), "services.log").open("w") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "towpath.testing.services",
                "up",
                *names,
                "--state-file",
                str(_state_path()),
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    while _running_state() is None:
        if process.poll() is not None:
            raise ServiceFailed(Path(log.name).read_text().strip())
        time.sleep(0.05)
    _status(arguments)


def _down(_: argparse.Namespace) -> None:
    state = _running_state()
    if state is None:
        return
    os.kill(state["pid"], signal.SIGTERM)
    deadline = time.monotonic() + 90
    while _start_time(state["pid"]) == state["started"]:
        if time.monotonic() > deadline:
            raise ServiceFailed(f"process {state['pid']} does not end")
        time.sleep(0.05)


def _status(arguments: argparse.Namespace) -> None:
    state = _running_state()
    if state is None:
        print("nothing is up", file=sys.stderr)
        sys.exit(3)
    _print([ServiceAddress(name, url) for name, url in state["addresses"]], arguments.output)


def _install(arguments: argparse.Namespace) -> None:
    for name in arguments.services or list(_INSTALLERS):
        _INSTALLERS[name]()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m towpath.testing.services", description="Real servers for demos, tests and benchmarks."
    )
    commands = parser.add_subparsers(required=True, metavar="up | down | status | install")
    up = commands.add_parser("up", help="start servers and stay until Ctrl-C, or leave them with --detach")
    up.add_argument("services", nargs="*", metavar="SERVICE", help=", ".join(_SERVERS))
    up.add_argument("--detach", action="store_true", help="return when they answer; end them with: down")
    up.add_argument("--state-file", type=Path, help=argparse.SUPPRESS)
    up.set_defaults(run=_up, known=_SERVERS)
    down = commands.add_parser("down", help="end what up --detach started")
    down.set_defaults(run=_down)
    status = commands.add_parser("status", help="print the addresses; exit 3 when nothing is up")
    status.set_defaults(run=_status)
    for command in (up, status):
        command.add_argument("--output", choices=["env", "json"], default="env")
    install = commands.add_parser("install", help="install what is missing")
    install.add_argument("services", nargs="*", metavar="SERVICE", help=", ".join(_INSTALLERS))
    install.set_defaults(run=_install, known=_INSTALLERS)
    arguments = parser.parse_args()
    for name in getattr(arguments, "services", []):
        if name not in arguments.known:
            parser.error(f"unknown service {name!r}, choose from {', '.join(arguments.known)}")
    return arguments


def main() -> None:
    """Runs one command; a service that is missing or fails is one message and exit code 1."""
    arguments = _parse()
    try:
        arguments.run(arguments)
    except (ServiceMissing, ServiceFailed) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
