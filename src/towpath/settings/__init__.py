"""Settings of the deployables and the CLI.

Environment variables `TOWPATH_…` win over a TOML file that `TOWPATH_CONFIG_FILE` names, and both over the
defaults; `towpath --set` sets a variable for one command. Nested ones are joined by two underscores
(`TOWPATH_RELAY__POLL_MAX=100ms`), and are keys of a table in the file (`[relay]`, `poll_max = "100ms"`).
Durations are text such as "250ms", "30s", "5m"; sizes are bytes or text such as "8MB", "64MiB". A key that
no setting has is refused, because a typo would otherwise be a silent default.
"""

from towpath.settings.loading import load, load_offline, variables
from towpath.settings.model import (
    FILE_VARIABLE,
    PREFIX,
    RelaySettings,
    Settings,
    TelemetrySettings,
    WorkerSettings,
)
from towpath.settings.schema import json_schema
from towpath.settings.types import WakeupMode

__all__ = [
    "FILE_VARIABLE",
    "PREFIX",
    "RelaySettings",
    "Settings",
    "TelemetrySettings",
    "WakeupMode",
    "WorkerSettings",
    "json_schema",
    "load",
    "load_offline",
    "variables",
]
