"""Where this database is published from and to: written down at first, compared from then on.

A physical copy of a database has its journal, its ids and its leases, and nothing inside it tells
that it is one. What differs is outside: the address under which the relay reaches it, and the broker
that the relay was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

from towpath.brokers.ports import Publisher
from towpath.errors import BrokerUnavailable, BrokerUnconfirmed, ConfigurationError, StoreUnavailable
from towpath.relay.link import Link, link_errors
from towpath.store.database import plain_url
from towpath.store.provenance import ProvenanceStore

_CONFIRM: Final = (
    "nothing is published until a person says that this is right (towpath outbox confirm) or where a copy "
    "begins (towpath outbox rebase)"
)
_LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "[::1]"})


class Provenance:
    """What one relay compares, on a connection that it opens for it and closes again."""

    def __init__(self, link: Link, store: ProvenanceStore, home: str, broker_number: int) -> None:
        self._link = link
        self._store = store
        self._home = home
        self._broker_number = broker_number

    async def check(self, publisher: Publisher) -> None:
        """Compare, or write down what nothing is known of yet.

        Raises BrokerUnconfirmed where something is not as before, and BrokerUnavailable when that
        could not be found out.
        """
        cluster = await publisher.cluster()
        try:
            with link_errors():
                found = await self._store.recognise(
                    await self._link.connection(), self._broker_number, cluster, self._home
                )
        except StoreUnavailable as error:
            raise BrokerUnavailable(
                f"the broker could not be compared with the journal's: {error}"
            ) from error
        finally:
            self._link.drop()
        if found is None:
            return
        if cluster is not None and found.cluster not in (None, cluster):
            raise BrokerUnconfirmed(
                f"this database was published to the broker {found.cluster} and this is {cluster}: {_CONFIRM}"
            )
        if found.home is not None and not is_same_home(found.home, self._home):
            raise BrokerUnconfirmed(
                f"this database was published from {found.home} and here it is {self._home}, maybe a copy: "
                f"{_CONFIRM}"
            )

    async def keep_partitions(self, counts: Mapping[str, int]) -> Mapping[str, int]:
        """The partition counts by which keys are placed: what was first written down, for each address."""
        try:
            with link_errors():
                return await self._store.keep_partitions(
                    await self._link.connection(), self._broker_number, counts
                )
        except (StoreUnavailable, ConfigurationError) as error:
            raise BrokerUnavailable(f"the partition counts could not be looked up: {error}") from error
        finally:
            self._link.drop()


def home_of(database_url: str) -> str:
    """Where a database is, as its URL says: hosts with ports, and its name; without credentials."""
    url = urlsplit(plain_url(database_url))
    hosts = url.netloc.rpartition("@")[2] or ",".join(parse_qs(url.query).get("host", ["localhost"]))
    named = []
    for host in unquote(hosts).split(","):
        name, colon, port = host.rpartition(":") if not host.endswith("]") else (host, "", "")
        name, port = (name, port) if colon else (host, "5432")
        named.append(f"{'localhost' if name in _LOOPBACK else name.lower()}:{port}")
    return f"{','.join(named)}/{unquote(url.path.lstrip('/'))}"


def is_same_home(known: str, found: str) -> bool:
    """Whether two are one: a host in common, in a list of hosts that changed, and the same database."""
    known_hosts, _, known_name = known.partition("/")
    found_hosts, _, found_name = found.partition("/")
    return known_name == found_name and not set(known_hosts.split(",")).isdisjoint(found_hosts.split(","))
