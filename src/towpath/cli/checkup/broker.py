"""Checks of the broker: reachable, protected, with everything declared."""

from towpath.brokers.factory import broker_of
from towpath.brokers.security import is_plaintext, is_unverified
from towpath.cli.checkup.model import Finding, Site, failure, ok, warning
from towpath.cli.topology import Wanted, canaries, other_queues, unused_partitions, wanted
from towpath.settings.types import revealed
from towpath.store.destinations import all_brokers, all_destinations


async def is_reachable(site: Site) -> list[Finding]:
    """Opens the connection that the others use."""
    site.admin = broker_of(site.settings).admin()
    site.stack.push_async_callback(site.admin.aclose)
    return ok(await site.admin.server())


async def is_encrypted(site: Site) -> list[Finding]:
    """TLS, and verified; on loopback nothing is demanded."""
    url, options = site.settings.broker_url.get_secret_value(), revealed(site.settings.broker_options)
    if is_plaintext(url):
        return warning("the connection is not encrypted: use kafka+ssl:// or amqps:// in TOWPATH_BROKER_URL")
    if is_unverified(options):
        return warning("the broker's certificate is not verified: drop ssl_verify, or give ssl_cafile")
    return ok("verified, or within this machine")


async def has_the_topology(site: Site) -> list[Finding]:
    """What `towpath broker check` says, for the groups given and every destination with a row."""
    connection, schema = site.connection, site.session.schema
    number = site.settings.relay.broker_number
    ours = {row["name"] for row in await all_brokers(connection, schema) if row["number"] == number}
    rows = [row for row in await all_destinations(connection, schema) if row["broker"] in ours]
    addresses = [row["address"] for row in rows]
    is_asked = addresses or site.app_paths
    asked = await wanted(site.app_paths, addresses) if is_asked else Wanted(canaries())
    problems = [*await other_queues(asked.apps), *await site.admin.check(asked.addresses, asked.groups)]
    warnings = [*await asked.outlived(site.admin), *await unused_partitions(site.admin, asked.addresses)]
    fix = "run towpath broker apply" + "".join(f" --app {path}" for path in site.app_paths)
    return [
        *(finding for problem in problems for finding in failure(f"{problem}: {fix}")),
        *(finding for line in warnings for finding in warning(line)),
    ] or ok(f"{len(asked.addresses)} addresses and {len(asked.groups)} groups have what they need")
