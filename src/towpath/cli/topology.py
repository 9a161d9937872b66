"""What commands that make or check topics and queues are about: broker, addresses, groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from towpath import settings
from towpath.backoff import parse_duration
from towpath.brokers.factory import broker_of
from towpath.brokers.ports import BrokerAdmin, GroupTopology
from towpath.brokers.retention import outlived
from towpath.cli.options import text
from towpath.cli.session import Session, connected
from towpath.errors import (
    BrokerUnavailable,
    SchemaMismatch,
    SettingsError,
    StoreUnavailable,
    TopologyError,
    UsageError,
)
from towpath.messages.limits import CANARY
from towpath.store.destinations import addresses_of
from towpath.store.groups import GroupStore, Terms
from towpath.store.provenance import ProvenanceStore

if TYPE_CHECKING:
    from towpath.app import App

_BROKER_SECONDS: Final = 60


def broker_number() -> int:
    """Which broker the settings are about."""
    return settings.load().relay.broker_number


def queues_of_settings() -> int | None:
    """Queues of a group per address; None at a broker where groups have none."""
    return broker_of(settings.load()).queues_per_group


@asynccontextmanager
async def admin_of_settings() -> AsyncIterator[BrokerAdmin]:
    """The admin of the broker of the settings, for one command."""
    admin = broker_of(settings.load()).admin()
    try:
        async with asyncio.timeout(_BROKER_SECONDS):
            yield admin
    except TimeoutError as error:
        raise BrokerUnavailable(f"the broker did not answer within {_BROKER_SECONDS} seconds") from error
    finally:
        await admin.aclose()


async def unused_partitions(admin: BrokerAdmin, addresses: Sequence[str]) -> list[str]:
    """One line for each topic whose keys are placed by fewer or more partitions than there are."""
    try:
        async with connected() as session:
            kept = await ProvenanceStore(session.schema).kept_partitions(
                session.connection, broker_number(), list(addresses)
            )
    except (SettingsError, SchemaMismatch, StoreUnavailable) as error:
        return [f"partitions were not compared with those that keys are placed by: {error}"]
    lines = []
    for address, count in sorted(kept.items()):
        try:
            found = len(await admin.bounds(address))
        except TopologyError:
            continue  # `check` told
        if found and found != count:
            lines.append(
                f"{address} has {found} partitions, keys are placed by {count} to keep their order: "
                "towpath broker rollover"
            )
    return lines


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a command was asked to make or check; a group for each app."""

    addresses: list[str]
    apps: list[App] = field(default_factory=list)
    groups: list[GroupTopology] = field(default_factory=list)

    async def outlived(self, admin: BrokerAdmin) -> list[str]:
        """One line for each topic that remembers longer than a group."""
        return [
            line
            for app, group in zip(self.apps, self.groups, strict=True)
            for line in await outlived(admin, group, parse_duration(app.retention))
        ]


async def wanted(apps: Sequence[str] | None, addresses: Sequence[str] | None) -> Wanted:
    if not apps and not addresses:
        raise UsageError("say what is needed: --app billing.consumer:app or --address orders")
    loaded = [app_of(text(path, "--app")) for path in apps or ()]
    groups = []
    if loaded:
        async with connected() as session:
            groups = [await topology_of(session, app) for app in loaded]
    own = {text(address, "--address", 200) for address in addresses or ()}
    return Wanted(sorted(own.union(canaries(), *(group.addresses for group in groups))), loaded, groups)


def canaries() -> list[str]:
    """Where canaries go, if they are on."""
    return [CANARY] if settings.load().relay.canaries else []


async def topology_of(session: Session, app: App) -> GroupTopology:
    """A group's destinations are looked up, since they may have other addresses."""
    mapped = await addresses_of(session.connection, app.destinations, session.schema)
    return GroupTopology(app.name, tuple(sorted(mapped.values())))


@asynccontextmanager
async def noted(apps: Sequence[App]) -> AsyncIterator[None]:
    """Note each group's terms with what is done inside. Raises GroupMismatch before, for other queues."""
    if not apps:
        yield
        return
    queues = queues_of_settings()
    async with connected() as session, session.connection.transaction():
        for app in sorted(apps, key=lambda app: app.name):
            await GroupStore(app.name, session.schema).note(session.connection, Terms(app.ordering, queues))
        yield


async def other_queues(apps: Sequence[App]) -> list[str]:
    """One line for each group that has other queues than the settings say."""
    if not apps:
        return []
    queues = queues_of_settings()
    async with connected() as session:
        found = [
            await GroupStore(app.name, session.schema).queues_problem(session.connection, queues)
            for app in apps
        ]
    return [problem for problem in found if problem is not None]


def app_of(target: str) -> App:
    from towpath.consumer.service import load_app  # noqa: PLC0415  the engine is heavy

    return load_app(target)
