"""Compose files and Kubernetes manifests: valid, and written for settings and commands that exist."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import kubernetes_validate
import pytest
import yaml

from towpath.settings import load, variables

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose/compose.yaml").read_text())
MANIFESTS = [
    pytest.param(document, id=f"{path.stem}: {document['kind']}")
    for path in sorted((ROOT / "compose/k8s").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
OWN_KINDS = {"ScaledObject", "TriggerAuthentication", "PodMonitor", "Kustomization"}
"""Of operators, whose schemas no package carries."""


def test_the_compose_file_follows_the_specification() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"],
        cwd=ROOT / "compose",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_compose_service_waits_for_services_that_exist_and_mounts_files_that_exist() -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services), name
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            known = (
                (ROOT / "compose" / source).exists()
                if source.startswith(".")
                else source in COMPOSE["volumes"]
            )
            assert known, f"{name} mounts {source}"


@pytest.mark.parametrize(
    ("profiles", "missing"),
    [
        ({"core"}, {"kafka", "rabbitmq"}),
        ({"kafka"}, {"rabbitmq"}),
        ({"rabbitmq"}, {"kafka"}),
        ({"kafka", "demo", "observability"}, {"rabbitmq"}),
        ({"rabbitmq", "demo", "observability"}, {"kafka"}),
        ({"observability"}, set[str]()),
    ],
    ids=lambda names: "+".join(sorted(names)) or "nothing",  # the same in every process
)
def test_profiles_bring_everything_that_their_services_wait_for(
    profiles: set[str], missing: set[str]
) -> None:
    active = {
        name: service
        for name, service in COMPOSE["services"].items()
        if profiles & set(service.get("profiles", profiles))
    }
    waited = {
        (other, how.get("required", True))
        for service in active.values()
        for other, how in service.get("depends_on", {}).items()
    }
    assert {other for other, _ in waited if other not in active} == missing
    assert {other for other, is_required in waited if is_required} <= set(active)
    assert ("relay" in active) == bool(profiles & {"core", "kafka", "rabbitmq"})
    assert (("demo" in active), ("grafana" in active)) == ("demo" in profiles, "observability" in profiles)


@pytest.mark.parametrize(
    "service", [name for name, each in COMPOSE["services"].items() if "environment" in each]
)
def test_the_settings_of_a_compose_service_are_accepted(
    service: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2: in both variants of the broker."""
    given = COMPOSE["services"][service]["environment"]
    ours = {name: str(value) for name, value in given.items() if name.startswith("TOWPATH_")}
    if not ours:
        return
    for pairs in ({}, _pairs(ROOT / "compose/rabbitmq.env")):
        for name, value in ours.items():
            monkeypatch.setenv(name, re.sub(r"\$\{(\w+):-(.*)\}$", lambda m: pairs.get(m[1], m[2]), value))  # noqa: B023
        assert load().database_url.get_secret_value() == ours["TOWPATH_DATABASE_URL"]


def _pairs(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def _commands() -> Iterator[Any]:
    for name, service in COMPOSE["services"].items():
        for words in _towpath(service.get("command", [])):
            yield pytest.param(words, id=f"compose {name}: {' '.join(words)}")
    for parameter in MANIFESTS:
        text = json.dumps(parameter.values[0])
        for command in re.findall(r'"command": (\[[^\]]*\])', text):
            for words in _towpath(json.loads(command)):
                yield pytest.param(words, id=f"{parameter.id}: {' '.join(words)}")


def _towpath(command: list[str]) -> Iterator[list[str]]:
    if command[:2] == ["sh", "-c"]:
        for part in command[2].split("&&"):
            yield from _towpath(shlex.split(part.partition(">")[0]))
    elif command[:1] == ["towpath"]:
        yield command[1:]


@pytest.mark.parametrize("words", list(_commands()))
def test_a_command_of_a_manifest_is_one_of_the_command_line(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "towpath.cli", *words, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", MANIFESTS)
def test_a_manifest_is_valid(document: dict[str, Any]) -> None:
    if document["kind"] in OWN_KINDS:
        assert set(document) >= {"apiVersion", "kind"}
        return
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_the_kustomization_lists_every_manifest() -> None:
    directory = ROOT / "compose/k8s"
    listed = yaml.safe_load((directory / "kustomization.yaml").read_text())["resources"]
    assert sorted(listed) == sorted(
        path.name for path in directory.glob("*.yaml") if path.name != "kustomization.yaml"
    )


@pytest.mark.parametrize(
    "document", [each for each in MANIFESTS if each.values[0]["kind"] in ("Deployment", "Job")]
)
def test_a_pod_meets_the_restricted_profile(document: dict[str, Any]) -> None:
    pod = document["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert container["resources"]["limits"]["memory"]
        assert {
            each["name"] for each in container.get("env", ()) if each["name"].startswith("TOWPATH_")
        } <= set(variables())


async def test_the_scaler_asks_postgres_what_it_can_answer_by_index(migrated_url: str) -> None:
    """The query of the KEDA trigger, as written, on the real schema."""
    (scaled,) = (each.values[0] for each in MANIFESTS if each.values[0]["kind"] == "ScaledObject")
    (query,) = (
        trigger["metadata"]["query"]
        for trigger in scaled["spec"]["triggers"]
        if trigger["type"] == "postgresql"
    )
    connection = await asyncpg.connect(migrated_url)
    try:
        count = await connection.fetchval(query)
        await connection.execute("set enable_seqscan = off")
        plan = await connection.fetchval(f"explain (format json) {query}")
    finally:
        await connection.close()
    assert count == 0
    assert "task_due" in plan
