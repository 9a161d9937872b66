"""A small init process: runs a server's processes for a launcher, and outlives it only to clean up.

Run by path with the standard library only. Commands arrive as JSON lines on standard input, each answered by
one line on standard output. When the input ends, the launcher is gone (however it went): every process is
ended and the run directory removed. If this process itself is killed, the kernel kills the servers.
"""

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
STOP_SECONDS = 20.0
_libc = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _parents() -> dict[int, int]:
    """Parent by pid, of every process."""
    parents: dict[int, int] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(entry.path, "stat").read_text(errors="replace")
                parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    return parents


def _tree(root: int) -> list[int]:
    parents = _parents()
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found, pending = [], [root]
    while pending:
        pid = pending.pop()
        found.append(pid)
        pending.extend(children.get(pid, ()))
    return found


def _send(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)


def _is_at_rest(pid: int) -> bool:
    """Whether none of its threads runs: stopped, or dead."""
    try:
        states = [
            Path(thread.path, "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
            for thread in os.scandir(f"/proc/{pid}/task")
        ]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return all(state in "TtZX" for state in states)


class Supervisor:
    """Owns the processes of one server, by name."""

    def __init__(self, run_directory: str) -> None:
        self._run_directory = run_directory
        self._pids: dict[str, int] = {}
        self._codes: dict[int, int] = {}
        self._ends: dict[str, tuple[int, float]] = {}

    def reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                self._codes[pid] = os.waitstatus_to_exitcode(status)

    def spawn(self, request: dict[str, Any]) -> dict[str, Any]:
        identity = {"user": request["uid"], "group": request["gid"], "extra_groups": []}
        with Path(request["log"]).open("ab") as log:
            process = subprocess.Popen(
                request["argv"],
                env=request["env"],
                cwd=request["cwd"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - this process has one thread
                **(identity if request["uid"] is not None else {}),
            )
        self._pids[request["name"]] = process.pid
        self._ends[request["name"]] = (request["end_signal"], request["end_grace_seconds"])
        process.returncode = 0  # reaped here, not by Popen
        return {"pid": process.pid}

    def poll(self, request: dict[str, Any]) -> dict[str, Any]:
        self.reap()
        return {"code": self._codes.get(self._pids[request["name"]])}

    def signal(self, request: dict[str, Any]) -> dict[str, Any]:
        pid = self._pids[request["name"]]
        self.reap()
        if pid not in self._codes:
            for target in _tree(pid) if request["tree"] else [pid]:
                _send(target, request["signal"])
            if request["signal"] == signal.SIGSTOP:
                self._wait_for_rest(pid, is_for_tree=request["tree"])
        return {}

    @staticmethod
    def _wait_for_rest(root: int, *, is_for_tree: bool) -> None:
        """Until the thread that got the signal has a processor the others run on, and may answer or fork."""
        deadline = time.monotonic() + STOP_SECONDS
        while running := [pid for pid in (_tree(root) if is_for_tree else [root]) if not _is_at_rest(pid)]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"still running {STOP_SECONDS:g} s after SIGSTOP: {running}")
            for pid in running:
                _send(pid, signal.SIGSTOP)
            time.sleep(0.001)

    def stop(self, request: dict[str, Any]) -> dict[str, Any]:
        return {"code": self._stop(request["name"], request["signal"], request["grace_seconds"])}

    def _stop(self, name: str, signum: int, grace_seconds: float) -> int:
        """Ends a process with everything below it, and returns its exit code."""
        pid = self._pids[name]
        self.reap()
        if pid not in self._codes:
            tree = _tree(pid)
            for target in tree if signum == signal.SIGKILL else [pid]:
                _send(target, signum)
            for target in tree:
                _send(target, signal.SIGCONT)
        deadline = time.monotonic() + grace_seconds
        self.reap()
        while pid not in self._codes and time.monotonic() < deadline:
            time.sleep(0.005)
            self.reap()
        self._kill_all_but({other for key, other in self._pids.items() if key != name})
        return self._codes[pid]

    def _kill_all_but(self, kept: set[int]) -> None:
        """Kills the descendants outside the kept trees; as their subreaper we are the parent of orphans."""
        while True:
            self.reap()
            mine = os.getpid()
            doomed = [pid for pid, parent in _parents().items() if parent == mine and pid not in kept]
            if not doomed:
                return
            for child in doomed:
                for pid in _tree(child):
                    _send(pid, signal.SIGKILL)
            time.sleep(0.005)

    def close(self) -> None:
        for name in reversed(list(self._pids)):
            self._stop(name, *self._ends[name])
        self._kill_all_but(set())
        shutil.rmtree(self._run_directory, ignore_errors=True)


def main() -> None:
    """Serves the launcher until its end of the pipe closes, it is gone, or a SIGTERM comes."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    launcher = int(sys.argv[1])
    supervisor = Supervisor(sys.argv[2])
    is_ending = False

    def end(*_: object) -> None:
        nonlocal is_ending
        is_ending = True

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    operations = {
        "spawn": supervisor.spawn,
        "poll": supervisor.poll,
        "signal": supervisor.signal,
        "stop": supervisor.stop,
    }
    pending = b""
    while not is_ending and os.getppid() == launcher:
        readable, _, _ = select.select([0], [], [], 0.5)
        supervisor.reap()
        if not readable:
            continue
        chunk = os.read(0, 65536)
        if not chunk:
            break
        *lines, pending = (pending + chunk).split(b"\n")
        for line in lines:
            request = json.loads(line)
            try:
                reply = operations[request["operation"]](request)
            except OSError as error:
                reply = {"error": str(error)}
            with contextlib.suppress(OSError):
                os.write(1, json.dumps(reply).encode() + b"\n")
    supervisor.close()


if __name__ == "__main__":
    main()
