"""A Java runtime of at least version 17, and libraries from Maven."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from towpath.testing.services import apt
from towpath.testing.services.errors import ServiceMissing
from towpath.testing.services.processes import run

_LOWEST = 17
_PACKAGES = ("openjdk-17-jre-headless", "openjdk-21-jre-headless", "default-jre-headless")


@dataclass(frozen=True)
class Artifact:
    """Coordinates of a library."""

    group: str
    name: str
    version: str


def _version(java: Path) -> int:
    try:
        result = subprocess.run([str(java), "-version"], capture_output=True, text=True, check=False)
    except OSError:
        return 0
    found = re.search(r'version "(?:1\.)?(\d+)', result.stderr)
    return int(found.group(1)) if found else 0


def _candidates() -> list[Path]:
    found = []
    if home := os.environ.get("JAVA_HOME"):
        found.append(Path(home, "bin", "java"))
    if on_path := shutil.which("java"):
        found.append(Path(on_path))
    return [*found, *sorted(Path("/usr/lib/jvm").glob("*/bin/java"))]


def find_java() -> Path:
    """The first Java that is new enough: JAVA_HOME, the PATH, then the distribution's."""
    for java in _candidates():
        if _version(java) >= _LOWEST:
            return java
    raise ServiceMissing(f"Java {_LOWEST} or newer", "python -m towpath.testing.services install kafka")


def install_java() -> None:
    """Installs a Java runtime unless there is one."""
    try:
        find_java()
    except ServiceMissing:
        apt.install([apt.first_available(_PACKAGES)])
        find_java()


def copy_artifacts(artifacts: Sequence[Artifact], target: Path) -> None:
    """Downloads libraries with what they depend on into a directory, using Maven, installed if missing."""
    if shutil.which("mvn") is None:
        apt.install(["maven"])
    dependencies = "".join(
        f"<dependency><groupId>{artifact.group}</groupId><artifactId>{artifact.name}</artifactId>"
        f"<version>{artifact.version}</version></dependency>"
        for artifact in artifacts
    )
    print(f"downloading {artifacts[0].name} {artifacts[0].version}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="towpath-maven-") as scratch:
        Path(scratch, "pom.xml").write_text(
            "<project><modelVersion>4.0.0</modelVersion><groupId>towpath</groupId>"
            "<artifactId>services</artifactId><version>1</version><packaging>pom</packaging>"
            f"<dependencies>{dependencies}</dependencies></project>"
        )
        run(
            ["mvn", "-q", "-B", f"-Dmaven.repo.local={scratch}/repository", "dependency:copy-dependencies"]
            + ["-DincludeScope=runtime", f"-DoutputDirectory={target}"],
            failure="Maven could not fetch the libraries",
            env=os.environ,
            cwd=scratch,
        )
