"""The Grafana dashboards, made from a short list of what each panel asks.

`python compose/grafana/build.py` rewrites `dashboards/*.json`; a test keeps them the same.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

GROUP: Final = "messaging_consumer_group_name"
OF_GROUPS: Final = f'{GROUP}=~"$group"'
LEGEND: Final = f"{{{{{GROUP}}}}}"
CPU: Final = 'rate(process_cpu_seconds_total{job="%s"}[$__rate_interval])'
MEMORY: Final = 'process_resident_memory_bytes{job="%s"}'
IN_DOUBT: Final = 'towpath_task_state="UNKNOWN"'
LOST: Final = "sum by (instance) (increase(towpath_relay_leases_lost_total[$__rate_interval]))"
DIRECTORY: Final = Path(__file__).parent / "dashboards"
_COLUMNS: Final = 24


@dataclass(frozen=True)
class Panel:
    """One graph, or with `is_stat` one number. `queries` maps a legend to PromQL."""

    title: str
    queries: dict[str, str]
    unit: str = "short"
    is_stat: bool = False
    red_above: float | None = None
    width: int = 8


def _rate(metric: str, by: str, selector: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{selector}}}[$__rate_interval]))"


def _quantile(quantile: float, metric: str, by: str = "", selector: str = "") -> str:
    labels = f"le, {by}" if by else "le"
    buckets = f"sum by ({labels}) (rate({metric}_bucket{{{selector}}}[$__rate_interval]))"
    return f"histogram_quantile({quantile}, {buckets})"


def _by_group(metric: str, *more: str) -> str:
    return f"max by ({', '.join((GROUP, *more))}) ({metric}{{{OF_GROUPS}}})"


OVERVIEW: Final = (
    Panel("Oldest unsent", {"": "max(towpath_outbox_oldest_unsent_age_seconds)"}, "s", True, 60, 4),
    Panel("Relays' shards", {"": "sum(towpath_relay_shards_owned)"}, is_stat=True, width=4),
    Panel("Oldest due task", {"": "max(towpath_tasks_oldest_due_age_seconds)"}, "s", True, 60, 4),
    Panel(
        "Open dead letters",
        {"": f"sum(max by ({GROUP}) (towpath_dead_letters_open))"},
        is_stat=True,
        red_above=1,
        width=4,
    ),
    Panel(
        "In doubt",
        {"": f"sum(max by ({GROUP}) (towpath_tasks_open{{{IN_DOUBT}}}))"},
        is_stat=True,
        red_above=1,
        width=4,
    ),
    Panel("Open breakers", {"": "max(towpath_breakers_open)"}, is_stat=True, red_above=1, width=4),
    Panel(
        "Sent",
        {
            "{{messaging_destination_name}}": _rate(
                "messaging_client_sent_messages_total", "messaging_destination_name"
            )
        },
        "ops",
    ),
    Panel(
        "Settled",
        {
            f"{LEGEND} {{{{towpath_outcome}}}}": _rate(
                "towpath_tasks_settled_total", f"{GROUP}, towpath_outcome"
            )
        },
        "ops",
    ),
    Panel(
        "Dead letters",
        {
            f"{LEGEND} {{{{towpath_reason_code}}}}": _rate(
                "towpath_dead_letters_total", f"{GROUP}, towpath_reason_code"
            )
        },
        "ops",
    ),
)

RELAY: Final = (
    Panel("Unsent", {"messages": "max(towpath_outbox_pending)"}),
    Panel("Oldest unsent", {"age": "max(towpath_outbox_oldest_unsent_age_seconds)"}, "s", red_above=60),
    Panel(
        "Insert to confirmed",
        {
            "p50": _quantile(0.5, "towpath_outbox_publish_latency_seconds"),
            "p99": _quantile(0.99, "towpath_outbox_publish_latency_seconds"),
        },
        "s",
    ),
    Panel(
        "Publishing a window",
        {
            "p50": _quantile(0.5, "messaging_client_operation_duration_seconds"),
            "p99": _quantile(0.99, "messaging_client_operation_duration_seconds"),
        },
        "s",
    ),
    Panel(
        "Sent",
        {
            "{{messaging_destination_name}} {{error_type}}": _rate(
                "messaging_client_sent_messages_total", "messaging_destination_name, error_type"
            )
        },
        "ops",
    ),
    Panel(
        "Rows in a window",
        {
            "p50": _quantile(0.5, "towpath_relay_window_rows"),
            "p99": _quantile(0.99, "towpath_relay_window_rows"),
        },
    ),
    Panel(
        "Back-offs",
        {"{{towpath_reason_code}}": _rate("towpath_relay_backoffs_total", "towpath_reason_code")},
        "ops",
    ),
    Panel("Shards owned", {"{{instance}}": "sum by (instance) (towpath_relay_shards_owned)"}),
    Panel("Leases lost", {"{{instance}}": LOST}),
    Panel(
        "Ring slots",
        {"free": "max(towpath_outbox_slots_free)", "blocked": "max(towpath_outbox_slots_blocked)"},
    ),
    Panel(
        "Waiting for a decision",
        {
            "refused messages": "sum(towpath_relay_gates_closed)",
            "blocked shards": "sum(towpath_relay_shards_blocked)",
        },
    ),
    Panel(
        "Without an owner, paused",
        {
            "shards without an owner": "max(towpath_shards_unowned)",
            "paused: {{towpath_pause_scope}}": "max by (towpath_pause_scope) (towpath_outbox_pauses)",
        },
    ),
    Panel(
        "Held back",
        {
            "journal": "max(towpath_relay_journal_lag_seconds)",
            "oldest transaction": "max(towpath_database_oldest_transaction_age_seconds)",
        },
        "s",
    ),
    Panel("CPU", {"{{instance}}": CPU % "towpath-relay"}, "percentunit"),
    Panel("Memory", {"{{instance}}": MEMORY % "towpath-relay"}, "bytes"),
)

CONSUMERS: Final = (
    Panel("Received", {LEGEND: _rate("messaging_client_consumed_messages_total", GROUP, OF_GROUPS)}, "ops"),
    Panel(
        "Started, by what started them",
        {
            f"{LEGEND} {{{{towpath_trigger}}}}": _rate(
                "towpath_tasks_claimed_total", f"{GROUP}, towpath_trigger", OF_GROUPS
            )
        },
        "ops",
    ),
    Panel(
        "Settled, by outcome",
        {
            f"{LEGEND} {{{{towpath_outcome}}}}": _rate(
                "towpath_tasks_settled_total", f"{GROUP}, towpath_outcome", OF_GROUPS
            )
        },
        "ops",
    ),
    Panel(
        "Handlers, p50",
        {
            "{{towpath_message_type}}": _quantile(
                0.5, "messaging_process_duration_seconds", "towpath_message_type", OF_GROUPS
            )
        },
        "s",
    ),
    Panel(
        "Handlers, p99",
        {
            "{{towpath_message_type}}": _quantile(
                0.99, "messaging_process_duration_seconds", "towpath_message_type", OF_GROUPS
            )
        },
        "s",
    ),
    Panel(
        "Retries, by reason",
        {
            f"{LEGEND} {{{{towpath_reason_code}}}}": _rate(
                "towpath_task_retries_total", f"{GROUP}, towpath_reason_code", OF_GROUPS
            )
        },
        "ops",
    ),
    Panel(
        "Not finished, by state",
        {f"{LEGEND} {{{{towpath_task_state}}}}": _by_group("towpath_tasks_open", "towpath_task_state")},
    ),
    Panel("Due", {LEGEND: _by_group("towpath_tasks_due")}),
    Panel(
        "Oldest due, oldest running",
        {
            f"{LEGEND} due": _by_group("towpath_tasks_oldest_due_age_seconds"),
            f"{LEGEND} running": _by_group("towpath_tasks_oldest_running_age_seconds"),
        },
        "s",
    ),
    Panel("Open breakers", {LEGEND: _by_group("towpath_breakers_open")}, red_above=1),
    Panel(
        "Taken back from dead workers",
        {
            f"{LEGEND} {{{{towpath_reason_code}}}}": _rate(
                "towpath_tasks_reaped_total", f"{GROUP}, towpath_reason_code", OF_GROUPS
            )
        },
        "ops",
    ),
    Panel("Leases lost", {LEGEND: _rate("towpath_worker_leases_lost_total", GROUP, OF_GROUPS)}, "ops"),
    Panel("CPU", {"{{instance}}": CPU % "towpath-workers"}, "percentunit"),
    Panel("Memory", {"{{instance}}": MEMORY % "towpath-workers"}, "bytes"),
)

DEAD_LETTERS: Final = (
    Panel("Open", {LEGEND: _by_group("towpath_dead_letters_open")}, red_above=1, width=12),
    Panel(
        "In doubt",
        {LEGEND: f"max by ({GROUP}) (towpath_tasks_open{{{OF_GROUPS}, {IN_DOUBT}}})"},
        red_above=1,
        width=12,
    ),
    Panel(
        "New, by reason",
        {
            f"{LEGEND} {{{{towpath_reason_code}}}}": _rate(
                "towpath_dead_letters_total", f"{GROUP}, towpath_reason_code", OF_GROUPS
            )
        },
        "ops",
        width=12,
    ),
    Panel(
        "New, by stage",
        {
            f"{LEGEND} {{{{towpath_dead_letter_stage}}}}": _rate(
                "towpath_dead_letters_total", f"{GROUP}, towpath_dead_letter_stage", OF_GROUPS
            )
        },
        "ops",
        width=12,
    ),
)

DASHBOARDS: Final = {
    "overview": ("towpath: overview", OVERVIEW),
    "relay": ("towpath: relay", RELAY),
    "consumers": ("towpath: consumers", CONSUMERS),
    "dead-letters": ("towpath: dead letters", DEAD_LETTERS),
}


def _placed(panels: tuple[Panel, ...]) -> Iterator[dict[str, Any]]:
    x = y = height = 0
    for number, panel in enumerate(panels, 1):
        if x + panel.width > _COLUMNS:
            x, y, height = 0, y + height, 0
        size = 4 if panel.is_stat else 8
        place = {"x": x, "y": y, "w": panel.width, "h": size}
        x, height = x + panel.width, max(height, size)
        yield _drawn(panel, number, place)


def _drawn(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_above is not None:
        steps.append({"color": "red", "value": panel.red_above})
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
    }
    if panel.red_above is not None and not panel.is_stat:
        defaults["custom"] = {"thresholdsStyle": {"mode": "line"}}
    return {
        "id": number,
        "type": "stat" if panel.is_stat else "timeseries",
        "title": panel.title,
        "gridPos": place,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend or "__auto"}
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def dashboard(uid: str, title: str, panels: tuple[Panel, ...]) -> dict[str, Any]:
    """One dashboard as Grafana reads it from a file."""
    group = {
        "name": "group",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "query": f"label_values(towpath_tasks_open, {GROUP})",
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    has_groups = any("$group" in query for panel in panels for query in panel.queries.values())
    return {
        "uid": f"towpath-{uid}",
        "title": title,
        "tags": ["towpath"],
        "schemaVersion": 41,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "links": [{"type": "dashboards", "tags": ["towpath"], "title": "towpath", "asDropdown": False}],
        "templating": {"list": [group] if has_groups else []},
        "panels": list(_placed(panels)),
    }


def files() -> dict[str, str]:
    """What each file holds, by its name."""
    return {
        f"{uid}.json": json.dumps(dashboard(uid, title, panels), indent=1) + "\n"
        for uid, (title, panels) in DASHBOARDS.items()
    }


if __name__ == "__main__":
    for name, text in files().items():
        (DIRECTORY / name).write_text(text, encoding="utf-8")
