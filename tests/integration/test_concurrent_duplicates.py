"""Two members receive the same messages at the same time."""

import asyncio
from collections import Counter
from datetime import timedelta

import pytest
from uuid_utils.compat import uuid7

from tests.integration.engine import EFFECTS, Posted, bench, depot, effects
from tests.integration.test_effects import write
from towpath.app import App
from towpath.context import Batch, Call, OnceCall, Tx
from towpath.outcomes import Verdict

COUNT = 40


async def never_asked(call: OnceCall) -> Verdict[None]:
    raise AssertionError


def group(effect: str, calls: "Counter[int]") -> App:
    """A group whose handler of this effect counts its calls."""
    app = depot()
    if effect == "transactional":

        @app.transactional()
        async def sort(parcel: Posted, tx: Tx) -> None:
            calls[parcel.number] += 1
            await write(tx, parcel)

    elif effect == "batch":

        @app.batch(max_size=5)
        async def sort_all(parcels: Batch[Posted], tx: Tx) -> None:
            for parcel in parcels.payloads:
                calls[parcel.number] += 1
                await write(tx, parcel)

    elif effect == "idempotent":

        @app.idempotent()
        async def sort_outside(parcel: Posted, call: Call) -> None:
            calls[parcel.number] += 1
            async with call.transaction() as tx:
                await write(tx, parcel)

    else:

        @app.at_most_once(reconcile=never_asked)
        async def sort_once(parcel: Posted, call: OnceCall) -> None:
            async with call.once("sort"):
                calls[parcel.number] += 1

    return app


@pytest.mark.parametrize("effect", ["transactional", "batch", "idempotent", "at_most_once"])
async def test_what_two_members_receive_at_once_has_one_effect(migrated_url: str, effect: str) -> None:
    """C5, C6: each hears of every message from its own broker; the loser acknowledges and runs nothing."""
    calls: Counter[int] = Counter()
    app = group(effect, calls)
    lease = timedelta(minutes=1)  # else a slow machine may lose one, and what it ran is rightly run again
    async with bench(app, migrated_url, lease=lease) as one, bench(app, migrated_url, lease=lease) as other:
        await one.db.execute(EFFECTS)
        async with one.member(), other.member():
            ids = [uuid7() for _ in range(COUNT)]
            for number, id_ in enumerate(ids):
                parcel = Posted(f"k{number}", number)
                await asyncio.gather(*(each.publish(parcel, message_id=id_) for each in (one, other)))
            for id_ in ids:
                row = await one.reaches(id_, "SUCCEEDED", "DEAD", "UNKNOWN")
                assert (row["state"], row["attempt"], row["deliveries"]) == ("SUCCEEDED", 1, 1)
            await one.is_drained()
            await other.is_drained()
        assert calls == Counter(range(COUNT))
        if effect != "at_most_once":
            assert Counter(await effects(one)) == Counter((f"k{number}", number) for number in range(COUNT))
        assert await one.gates() == 0
        assert await one.letters() == []
