"""Random histories keep the promise; those of an engine with a planted defect do not."""

import os
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from typing import Any, Final

import pytest

from tests.property import histories
from tests.property.histories import world_of
from tests.property.scripts import Weather
from towpath.consumer.running import Runner
from towpath.store import claims, doubts, reaping, settles
from towpath.store.doubts import DoubtStore
from towpath.store.settles import SettleStore
from towpath.store.statements import load

pytestmark = [
    pytest.mark.slow,
    # A process that died leaves its connections as they are; here they share one with the living.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

HISTORIES: Final = 100
_ENOUGH: Final = 500
"""From so many on everything must have been seen that can come between."""
_SEEDS_TO_CATCH: Final = 96
_STUCK_SECONDS: Final = 15.0

EXPECTED: Final = (
    "crash", "crash before ack", "killed", "freeze", "lease lost", "failure", "kept", "doubt", "Happened",
    "DidNotHappen", "operator", "batch of several", "culprit",
)  # fmt: skip
"""What must have been seen, or the histories were too tame."""


@pytest.mark.timeout(3600)
async def test_any_history_keeps_the_promise(
    migrated_url: str, monkeypatch: pytest.MonkeyPatch, scale: float
) -> None:
    """C18, C5, C6, C9, C10, C19, C23, D1, D5: per kind of effect, in order per key, nothing lost or stuck.

    `TOWPATH_TEST_HISTORIES` says how many, `TOWPATH_TEST_SEED` where they begin.
    """
    count = int(os.environ.get("TOWPATH_TEST_HISTORIES", HISTORIES * scale))
    start = int(os.environ.get("TOWPATH_TEST_SEED", "0"))
    seen = Counter[str]()
    keep = SettleStore.keep

    async def counted(self: SettleStore, work: Any) -> bool:
        is_kept = await keep(self, work)
        seen["kept"] += is_kept
        return is_kept

    monkeypatch.setattr(SettleStore, "keep", counted)
    wrong = dict[str, object]()
    async with world_of(migrated_url) as world:
        async for account, found in world.run(range(start, start + count)):
            seen += account.stat
            if found:
                wrong[f"{account.group} ({account.weather})"] = found
    assert not wrong, "\n".join(f"{history}: {found}" for history, found in wrong.items())
    if count >= _ENOUGH:
        assert {cause: seen[cause] for cause in EXPECTED if not seen[cause]} == {}, "too tame"


Patch = pytest.MonkeyPatch


def in_sql(*changes: tuple[str, str, str]) -> Callable[[Patch], None]:
    """Statements with a clause changed: name, old text, new text."""

    def plant(patch: Patch) -> None:
        statements = dict(load("work"))
        for name, old, new in changes:
            assert old in statements[name], f"{name} has no {old!r} any more"
            statements[name] = statements[name].replace(old, new)

        def mutated(family: str, schema: str = "towpath") -> Any:
            return statements if family == "work" else load(family, schema)

        for module in (claims, settles, reaping, doubts):
            patch.setattr(module, "load", mutated)

    return plant


async def _yes(*_: object, **__: object) -> bool:
    return True


_TOKEN: Final = "and t.token = $3 and t.state || '' = 'RUNNING'"
_TOKENS: Final = "and t.token = any($3::uuid[]) and t.state || '' = 'RUNNING'"

_STORM, _KILLERS = Weather.STORM, Weather.KILLERS
DEFECTS: Final[dict[str, tuple[str, Weather, Callable[[Patch], None]]]] = {
    "a claim sees no gate": (
        "inverted",
        _STORM,
        in_sql(("lock_gates", "where g.consumer_group = $1", "where false and g.consumer_group = $1")),
    ),
    "a failure closes no gate": ("inverted", _STORM, lambda patch: patch.setattr(settles, "hold", _yes)),
    "the wrong follower is promoted": (
        "inverted",
        _STORM,
        in_sql(("next_of_lanes", "order by position, id limit 1", "order by position desc, id limit 1")),
    ),
    "a settle needs no token": (
        "doubled",
        _STORM,
        in_sql(("settle_one", "and t.token = $3 and t.state || '' = 'RUNNING'", "and $3::uuid is not null")),
    ),
    "a batch needs no tokens": (
        "doubled",
        _STORM,
        in_sql(
            (
                "succeed",
                "and t.token = any($3::uuid[]) and t.state || '' = 'RUNNING'",
                "and cardinality($3::uuid[]) > 0",
            )
        ),
    ),
    "a duplicate starts what is done": (
        "doubled",
        _STORM,
        in_sql(
            (
                "claim_events",
                "t.state = 'ACCEPTED' and (t.deliveries = 0 or $11)",
                "t.state in ('ACCEPTED', 'SUCCEEDED')",
            ),
            ("claim_events", "set state = 'RUNNING'", "set state = 'RUNNING', finished_at = null"),
        ),
    ),
    "an effect is not marked": ("doubled", _STORM, lambda patch: patch.setattr(DoubtStore, "mark", _yes)),
    "a reaper repeats what was marked": (
        "doubled",
        _STORM,
        in_sql(
            ("abandoned", "t.effect_state from", "null::text as effect_state from"),
            ("reap", "and t.effect_state is null", ""),
        ),
    ),
    "what somebody else runs is acknowledged": (
        "acknowledged early",
        _STORM,
        lambda patch: patch.setattr(Runner, "may_acknowledge", lambda *_: True),
    ),
    "long work is kept without its body": (
        "died wrongly",
        _STORM,
        in_sql(
            (
                "keep",
                "coalesce($6, t.payload)",
                "case when $6::bytea is null then t.payload else t.payload end",
            )
        ),
    ),
    "nobody counts deliveries": (
        "not ended",
        _KILLERS,
        lambda patch: patch.setattr(histories, "MAX_DELIVERIES", 10**6),
    ),
}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("defect", DEFECTS)
async def test_a_planted_defect_shows(migrated_url: str, monkeypatch: Patch, defect: str) -> None:
    """C18: the verdict can fail, for each way to break the promise that it knows."""
    fault, weather, plant = DEFECTS[defect]
    plant(monkeypatch)
    async with world_of(migrated_url) as world:
        judged = world.run(range(_SEEDS_TO_CATCH), weather=weather, seconds=_STUCK_SECONDS)
        async with aclosing(judged):
            async for _, found in judged:
                if fault in found:
                    return
    pytest.fail(f"{_SEEDS_TO_CATCH} histories with the defect looked right")
