"""Which messages of a window may not be acknowledged before which others."""

from collections.abc import Sequence

from towpath.brokers.ports import OutboundMessage

OrderKey = tuple[str, str]


def order_key(message: OutboundMessage) -> OrderKey | None:
    """(address, key): messages that share it keep their order. None without a key: no order is promised."""
    return None if message.key is None else (message.address, message.key)


def chains(window: Sequence[OutboundMessage], indexes: Sequence[int]) -> list[list[int]]:
    """Indexes grouped so that each group must be published one after another, in the window's order."""
    keyed: dict[OrderKey, list[int]] = {}
    groups: list[list[int]] = []
    for index in indexes:
        key = order_key(window[index])
        if key is None:
            groups.append([index])
        elif key in keyed:
            keyed[key].append(index)
        else:
            keyed[key] = [index]
            groups.append(keyed[key])
    return groups
