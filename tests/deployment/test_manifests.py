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
import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.deployment.kinds import KUSTOMIZATION, SCHEMAS, described
from tests.fixtures.images import IMAGES, read
from towpath.backoff import parse_duration
from towpath.brokers.kafka import config as kafka
from towpath.brokers.rabbitmq.topology import broker_dead_letter_address, group_queues
from towpath.consumer.service import load_app
from towpath.settings import load, variables
from towpath.settings.model import RelaySettings, WorkerSettings
from towpath.store.installed import library_version
from towpath.store.roles import grants

ROOT = Path(__file__).parents[2]
COMPOSE = yaml.safe_load((ROOT / "compose/compose.yaml").read_text())
K8S = ROOT / "compose/k8s"
MANIFESTS = [
    pytest.param(
        document,
        id=f"{path.relative_to(K8S).with_suffix('')}: {document['kind']}"
        f" {document.get('metadata', {}).get('name', '')}",
    )
    for path in sorted(K8S.rglob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
DOCUMENTS: list[dict[str, Any]] = [each.values[0] for each in MANIFESTS]


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
    if document["kind"] == "Kustomization":
        jsonschema.validate(document, KUSTOMIZATION)
        return
    if schema := SCHEMAS.get(document["kind"]):
        if document == PATCH:
            schema = {**schema, "required": ["triggers"]}
        jsonschema.validate(document, described(schema))
        return
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


(PATCH,) = yaml.safe_load_all((K8S / "rabbitmq/scaling.yaml").read_text())


@pytest.mark.parametrize("directory", [K8S, K8S / "rabbitmq"], ids=lambda path: path.name)
def test_a_kustomization_lists_every_manifest(directory: Path) -> None:
    given = yaml.safe_load((directory / "kustomization.yaml").read_text())
    listed = {*given["resources"], *(each["path"] for each in given.get("patches", ()))}
    there = {path.name for path in directory.glob("*.yaml")} - {"kustomization.yaml"}
    assert listed - {".."} == there
    assert {each["newTag"] for each in given.get("images", ())} <= {library_version()}


def _of(kind: str) -> dict[str, dict[str, Any]]:
    return {each["metadata"]["name"]: each for each in DOCUMENTS if each["kind"] == kind and each != PATCH}


def test_every_deployment_is_scaled_disrupted_with_care_and_reached_by_the_policy() -> None:
    (policy,) = _of("NetworkPolicy").values()
    (selected,) = policy["spec"]["podSelector"]["matchLabels"].items()
    names = set(_of("Deployment"))
    assert names == {"relay", "orders"}
    assert set(_of("ScaledObject")) == set(_of("PodDisruptionBudget")) == names
    for name, pod in (_of("Deployment") | _of("Job")).items():
        assert selected in pod["spec"]["template"]["metadata"]["labels"].items(), name
    known = set(_of("TriggerAuthentication"))
    for scaled in (*_of("ScaledObject").values(), PATCH):
        used = {each["authenticationRef"]["name"] for each in scaled["spec"]["triggers"] if len(each) == 3}
        assert used <= known
        assert "clock_timestamp" not in str(scaled), "what is volatile is no condition of an index"


def test_the_grace_of_a_process_is_longer_than_it_takes_to_drain() -> None:
    """S4: on Kubernetes and with compose. A relay writes down what it published, for ten seconds at most."""
    for name, deployment in _of("Deployment").items():
        pod = deployment["spec"]["template"]["spec"]
        given = {each["name"]: each["value"] for each in pod["containers"][0]["env"]}
        assert pod["terminationGracePeriodSeconds"] > _drain_seconds(name, given), name
        probes = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
        for probe, path in probes.items():
            assert pod["containers"][0][probe]["httpGet"] == {"path": path, "port": "health"}
    staying = {name: each for name, each in COMPOSE["services"].items() if "deploy" in each}
    assert set(staying) == {"relay", "orders", "agents"}
    for name, service in staying.items():
        grace = parse_duration(service["stop_grace_period"]).total_seconds()
        assert grace > _drain_seconds(name, service["environment"]), name


def _drain_seconds(name: str, environment: dict[str, str]) -> float:
    """With some time for what comes behind it."""
    if name == "relay":
        return RelaySettings().publish_deadline.total_seconds() + 15
    told = environment.get("TOWPATH_WORKER__DRAIN_TIMEOUT")
    return (parse_duration(told) if told else WorkerSettings().drain_timeout).total_seconds() + 10


def test_only_what_stays_is_asked_for_its_health() -> None:
    """`up --wait` fails on a container that is unhealthy, and nobody answers for one that ends by itself."""
    for name, service in COMPOSE["services"].items():
        if service["image"] in [read(each).tag for each in IMAGES]:
            assert (service.get("healthcheck") == {"disable": True}) is ("deploy" not in service), name


def test_the_patch_for_rabbitmq_changes_what_is_there_and_only_the_signal_of_the_broker() -> None:
    (base,) = [each for each in _of("ScaledObject").values() if each["metadata"]["name"] == "orders"]
    (namespace,) = _of("Namespace")
    assert PATCH["metadata"] == {"name": "orders", "namespace": namespace}
    kinds = [[each["type"] for each in scaled["spec"]["triggers"]] for scaled in (base, PATCH)]
    assert kinds == [["kafka", "postgresql"], ["rabbitmq", "postgresql"]]
    assert PATCH["spec"]["triggers"][1] == base["spec"]["triggers"][1]


def test_the_policy_lets_out_to_what_the_processes_need() -> None:
    """The usual ports: DNS, Postgres, Kafka and RabbitMQ (with TLS), a collector."""
    (policy,) = _of("NetworkPolicy").values()
    (rule,) = policy["spec"]["egress"]
    assert {each["port"] for each in rule["ports"]} == {53, 5432, kafka.DEFAULT_PORT, 9093, 5671, 4318}


def test_the_scaler_counts_the_messages_of_the_groups_queues() -> None:
    """Every queue that the group reads, and none of its dead letters."""
    pattern = PATCH["spec"]["triggers"][0]["metadata"]["queueName"]
    addresses = load_app("consumers.groups.orders.app:app").destinations
    ours = [queue.name for address in addresses for queue in group_queues("orders", address, 12)]
    assert all(re.search(pattern, name) for name in ours)
    others = [broker_dead_letter_address("orders", address) for address in addresses]
    assert not any(
        re.search(pattern, name) for name in (*others, "orders-eu.orders.0", "orders.orders.0.dlq")
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


@pytest.mark.parametrize(
    ("scaled", "index", "count"), [("orders", r"task_due\w*", 0), ("relay", r"outbox_0_\w*xid\w*", 3)]
)
async def test_a_scaler_asks_postgres_what_it_can_answer_by_index(
    migrated_url: str, scaled: str, index: str, count: int
) -> None:
    """X5: the queries of the KEDA triggers, as written, by the role whose login they use."""
    (trigger,) = (
        each for each in _of("ScaledObject")[scaled]["spec"]["triggers"] if each["type"] == "postgresql"
    )
    query, login = trigger["metadata"]["query"], trigger["authenticationRef"]["name"]
    connection = await asyncpg.connect(migrated_url)
    transaction = connection.transaction()
    await transaction.start()
    try:
        prefix = await connection.fetchval("select current_database()")  # roles belong to the whole cluster
        await connection.execute(grants("towpath", prefix))
        for key in ("a", "b", "c"):
            await connection.execute("select towpath.emit('orders', 'order.placed', '{}', $1)", key)
        await connection.execute(f"set local role {prefix}_{login.removeprefix('towpath-')}")
        await connection.execute("set local enable_seqscan = off")
        plan = await connection.fetchval(f"explain (format json) {query}")
        counted = await connection.fetchval(query)
    finally:
        await transaction.rollback()
        await connection.close()
    assert counted == count
    assert re.search(rf'"Index Name": "{index}"', plan), plan
