"""What `towpath doctor` looks at. A check is a function in a list: adding one is writing one."""

from typing import Final

from towpath.cli.checkup import broker, database, groups, local
from towpath.cli.checkup.model import Check

CHECKS: Final = (
    Check("settings", local.settings_are_right),
    Check("app", local.apps_are_right, ("settings",)),
    Check("database", database.is_reachable, ("settings",)),
    Check("database tls", database.is_encrypted, ("database",)),
    Check("database version", database.is_recent, ("database",)),
    Check("durability", database.is_durable, ("database",)),
    Check("connections", database.has_connections_left, ("database",)),
    Check("open transactions", database.holds_no_horizon, ("database",)),
    Check("clock", database.agrees_on_time, ("database",)),
    Check("pooler", database.is_direct, ("database",)),
    Check("listener", database.hears_notifications, ("database",)),
    Check("schema", database.has_the_schema, ("database",)),
    Check("grants", database.has_grants, ("database", "schema")),
    Check("relays", database.has_relays, ("database", "schema")),
    Check("groups", groups.agree_with_their_apps, ("app", "database", "schema")),
    Check("broker", broker.is_reachable, ("settings",)),
    Check("broker tls", broker.is_encrypted, ("settings",)),
    Check("topology", broker.has_the_topology, ("broker", "database", "schema")),
    Check("relay", local.relay_is_ready, ("settings",)),
    Check("worker", local.worker_is_ready, ("settings",)),
)
