"""Names and arguments of exchanges and queues, and nothing that connects.

Address: a durable topic exchange. Group and address: `shares` quorum queues `<group>.<address>.<n>`,
each with a single active consumer and bound to its share of the routing slots; what the broker itself
dead-letters goes to `<group>.<address>.dlx`, from where every member brings it into the catalog; copies of
dead letters go to `<group>.<address>.dlq`, which is for other tools.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from towpath.brokers.ports import ROUTING_SLOTS, GroupTopology, dead_letter_address
from towpath.messages.limits import CANARY

DELIVERY_LIMIT: Final = 1000
"""Large and positive: poison is counted by the engine, and a lost connection counts here too."""

LAST_LIMIT: Final = 1_000_000_000
"""Nothing may fall out of a queue that has no further dead-letter exchange. (Without it RabbitMQ 4 drops a
message at its 20th delivery.)"""


@dataclass(frozen=True, slots=True)
class QueueSpec:
    """One queue as it must be declared; redeclaring with other arguments is refused by the broker."""

    name: str
    exchange: str
    binding_keys: tuple[str, ...] = ("#",)
    arguments: dict[str, str | int | bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Topology:
    """Exchanges (durable, topic) and queues (durable)."""

    exchanges: tuple[str, ...]
    queues: tuple[QueueSpec, ...]


def broker_dead_letter_address(group: str, address: str) -> str:
    """Where RabbitMQ puts what it dead-letters by itself."""
    return f"{group}.{address}.dlx"


def group_queue(group: str, address: str, share: int) -> str:
    """The queue of one share of a group's messages from one address."""
    return f"{group}.{address}.{share}"


def group_queues(group: str, address: str, shares: int) -> Iterator[QueueSpec]:
    """A group's queues for one address: slots with `slot % shares = n` go to queue n."""
    for share in range(shares):
        slots = [slot for slot in range(ROUTING_SLOTS) if slot % shares == share]
        yield QueueSpec(
            name=group_queue(group, address, share),
            exchange=address,
            binding_keys=("#",) if shares == 1 else tuple(f"{slot}.#" for slot in slots),
            arguments={
                "x-queue-type": "quorum",
                "x-single-active-consumer": True,
                "x-delivery-limit": DELIVERY_LIMIT,
                "x-dead-letter-exchange": broker_dead_letter_address(group, address),
                # Without reject-publish the broker would silently dead-letter at most once.
                "x-dead-letter-strategy": "at-least-once",
                "x-overflow": "reject-publish",
            },
        )


def broker_dead_letter_queue(group: str, address: str) -> QueueSpec:
    """What the broker dead-letters by itself of a group's messages from one address."""
    name = broker_dead_letter_address(group, address)
    return QueueSpec(name, name, arguments=_LAST)


_CANARIES: Final[dict[str, str | int | bool]] = {
    "x-queue-type": "quorum",
    "x-delivery-limit": LAST_LIMIT,
    "x-max-length": 100,
    "x-overflow": "drop-head",
}
"""Nobody has to read them: the newest stay."""

_LAST: Final[dict[str, str | int | bool]] = {"x-queue-type": "quorum", "x-delivery-limit": LAST_LIMIT}


def topology_of(addresses: Sequence[str], groups: Sequence[GroupTopology], shares: int) -> Topology:
    """Everything that these addresses and groups need, dead-letter targets before what refers to them."""
    exchanges = dict.fromkeys(addresses)
    queues = [QueueSpec(CANARY, CANARY, arguments=_CANARIES)] if CANARY in exchanges else []
    for group in groups:
        for address in group.addresses:
            exchanges[address] = None
            copies = dead_letter_address(group.group, address)
            for queue in (
                QueueSpec(copies, copies, arguments=_LAST),
                broker_dead_letter_queue(group.group, address),
            ):
                exchanges[queue.exchange] = None
                queues.append(queue)
            queues.extend(group_queues(group.group, address, shares))
    return Topology(tuple(exchanges), tuple(queues))
