"""Installing distribution packages without letting their services start."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

from towpath.testing.services.errors import ServiceMissing

# A policy-rc.d that answers 101 keeps packages from starting their services; one that is there and says so
# already is left alone, any other is put back afterwards. An epmd that the package leaves behind is ended.
_SCRIPT = r"""
set -eu
policy=/usr/sbin/policy-rc.d
kept=$policy.towpath-kept
restore() {
    if [ "${replaced:-}" ]; then rm -f "$policy"; fi
    if [ -e "$kept" ]; then mv "$kept" "$policy"; fi
}
trap restore EXIT
trap 'exit 1' HUP INT TERM
denies() {
    code=0
    "$policy" rabbitmq-server start >/dev/null 2>&1 || code=$?
    [ "$code" = 101 ]
}
if ! denies; then
    if [ -e "$policy" ]; then mv "$policy" "$kept"; fi
    replaced=yes
    printf '#!/bin/sh\nexit 101\n' > "$policy"
    chmod 755 "$policy"
fi
epmds() { for entry in /proc/[0-9]*; do
    if [ "$(cat "$entry/comm" 2>/dev/null)" = epmd ]; then echo "${entry#/proc/}"; fi
done; }
before=" $(epmds | tr '\n' ' ') "
export DEBIAN_FRONTEND=noninteractive
apt-get -q -q -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 update
apt-get -q -y -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 install --no-install-recommends "$@"
for pid in $(epmds); do
    case "$before" in *" $pid "*) ;; *) kill "$pid" || true ;; esac
done
"""


def install(packages: Sequence[str]) -> None:
    """Installs Debian packages, by sudo when not root; raises ServiceMissing where that is impossible."""
    command = f"apt-get install {' '.join(packages)}"
    if shutil.which("apt-get") is None:
        raise ServiceMissing(f"apt-get, which would install {' '.join(packages)},", command)
    prefix: list[str] = []
    if os.geteuid() != 0:
        if shutil.which("sudo") is None:
            raise ServiceMissing(f"the right to install {' '.join(packages)}", f"(as root) {command}")
        prefix = ["sudo"]
    print(f"installing {' '.join(packages)}", file=sys.stderr, flush=True)
    result = subprocess.run(
        [*prefix, "sh", "-c", _SCRIPT, "apt-install", *packages],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if result.returncode != 0:
        print(result.stdout, file=sys.stderr)
        raise ServiceMissing(" ".join(packages), command)


def first_available(candidates: Sequence[str]) -> str:
    """The first of several packages that this distribution knows."""
    for package in candidates:
        result = subprocess.run(
            ["apt-cache", "show", package], stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        if result.returncode == 0:
            return package
    return candidates[-1]
