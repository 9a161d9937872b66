"""Whether a broker remembers longer than a consumer group does."""

from datetime import timedelta

from towpath.brokers.ports import BrokerAdmin, GroupTopology


async def outlived(admin: BrokerAdmin, group: GroupTopology, rows_kept_for: timedelta) -> list[str]:
    """One line for each address whose messages can be read again when the group has forgotten them.

    They would run a second time. `rows_kept_for` is the group's retention of finished rows.
    """
    warnings = []
    for address in group.addresses:
        kept_for = await admin.kept_for(address)
        if kept_for is not None and kept_for > rows_kept_for:
            how_long = "for ever" if kept_for == timedelta.max else f"for {_days(kept_for)}"
            warnings.append(
                f"{address} keeps messages {how_long} and group {group.group} its rows for "
                f"{_days(rows_kept_for)}: what is read again after that runs again; shorten the topic's "
                "retention or lengthen App(retention=…)"
            )
    return warnings


def _days(span: timedelta) -> str:
    days = span / timedelta(days=1)
    return f"{days:.0f} days" if days >= 1 and days == int(days) else f"{span.total_seconds() / 3600:g} hours"
