"""The handlers of one process of a random history: they do as told, and the process may die in them."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final
from uuid import UUID

import asyncpg
from sqlalchemy import text

from tests.property.scripts import ATTEMPTS, Charge, Outward, Script, Step, Tally, Weather
from towpath.app import App
from towpath.backoff import RetryPolicy
from towpath.context import Batch, Call, OnceCall, Tx
from towpath.outcomes import Dead, DidNotHappen, Happened, Retry, StillUnknown, Verdict

LEDGER: Final = """create table public.deed
  (n bigserial primary key, consumer_group text, id uuid, kind text, key text, sequence int,
   idempotency_key text)"""
"""What really happened. The inside writes to it in handlers' transactions, the outside on its own."""

_INSERT: Final = "insert into public.deed (consumer_group, id, kind, key, sequence, idempotency_key) values "
_INSIDE: Final = text(f"{_INSERT} (:group, :id, :kind, :key, :sequence, null)")
_BASE, _CAP = "1ms", "20ms"


class Provider:
    """The outside of one history: keeps what it was asked to do, and knows what is still on its way."""

    def __init__(self, pool: "asyncpg.Pool[Any]", group: str) -> None:
        self._pool = pool
        self._group = group
        self._on_their_way: Counter[UUID] = Counter()

    async def act(self, script: Script, key: str) -> None:
        """Happens once begun, whatever becomes of the caller."""
        self.expect(script.id)
        insert = asyncio.create_task(
            self._pool.execute(
                f"{_INSERT} ($1, $2, $3, $4, $5, $6)",
                self._group,
                script.id,
                script.kind,
                script.key,
                script.sequence,
                key,
            )
        )
        insert.add_done_callback(lambda _: self.forget(script.id))
        await asyncio.shield(insert)

    def expect(self, id_: UUID) -> None:
        """A caller has begun and may still act: nobody can say yet that nothing happened."""
        self._on_their_way[id_] += 1

    def forget(self, id_: UUID) -> None:
        """That caller acts no more."""
        self._on_their_way[id_] -= 1

    async def answer(self, id_: UUID) -> Verdict[None]:
        """The truth."""
        if self._on_their_way[id_]:
            return StillUnknown()
        found = await self._pool.fetchval(
            "select exists (select 1 from public.deed where consumer_group = $1 and id = $2)",
            self._group,
            id_,
        )
        return Happened(None) if found else DidNotHappen()


class Fortune:
    """When this process crashes or freezes: `die` and `freeze` end or suspend the whole process."""

    def __init__(
        self,
        rnd: random.Random,
        weather: Weather,
        stat: Counter[str],
        die: Callable[[], None],
        freeze: Callable[[UUID], Awaitable[None]],
    ) -> None:
        self.rnd = rnd
        self.stat = stat
        self.die = die
        self._weather = weather
        self._freeze = freeze

    async def strike(self, id_: UUID) -> None:
        """A point at which a process may be lost, in the handler of this message."""
        if self._weather is Weather.KILLERS:
            return
        dice = self.rnd.random()
        if dice < 0.01:
            await self.crash("crash")
        elif dice < 0.025:
            self.stat["freeze"] += 1
            await self._freeze(id_)

    async def crash(self, cause: str) -> None:
        """Nothing after this."""
        self.stat[cause] += 1
        self.die()
        await asyncio.Event().wait()


class Group:
    """What one process does.

    Of the whole history are `lone_failures`, since a batch does not know its attempt, and `begun`:
    how often the handler of a message was entered.
    """

    def __init__(
        self,
        name: str,
        scripts: Mapping[UUID, Script],
        provider: Provider,
        fortune: Fortune,
        lone_failures: Counter[UUID],
        begun: Counter[UUID],
    ) -> None:
        self._scripts = scripts
        self._provider = provider
        self._fortune = fortune
        self._stat = fortune.stat
        self._lone_failures = lone_failures
        self._begun = begun
        self.app = app = App(name, retry=RetryPolicy(attempts=ATTEMPTS, base=_BASE, cap=_CAP))
        app.transactional()(self._step)
        app.idempotent()(self._call)
        app.at_most_once(reconcile=self._ask, retry=RetryPolicy(attempts=1000, base=_BASE, cap=_CAP))(
            self._charge
        )
        app.batch(max_size=4, max_wait="15ms")(self._tally)

    async def _step(self, _: Step, tx: Tx) -> None:
        script = self._scripts[tx.message_id]
        await self._begin(script, tx.attempt.attempt)
        await tx.session.execute(_INSIDE, self._deed(script))
        if script.end == "dies":
            raise Dead("told_to")
        await self._fortune.strike(script.id)

    async def _call(self, _: Outward, call: Call) -> None:
        script = self._scripts[call.message_id]
        await self._begin(script, call.attempt.attempt)
        if script.end == "dies":
            raise Dead("told_to")
        await self._provider.act(script, call.idempotency_key("act"))
        await self._fortune.strike(script.id)

    async def _ask(self, call: OnceCall) -> Verdict[None]:
        if self._scripts[call.message_id].is_silent:
            return StillUnknown()
        verdict = await self._provider.answer(call.message_id)
        self._stat[type(verdict).__name__] += 1
        return verdict

    async def _charge(self, _: Charge, call: OnceCall) -> None:
        script = self._scripts[call.message_id]
        await self._begin(script, call.attempt.attempt)
        if script.end == "dies":
            raise Dead("told_to")
        self._provider.expect(script.id)
        try:
            async with call.once():
                await self._charge_once(script, call.idempotency_key())
        finally:
            self._provider.forget(script.id)
        await self._fortune.strike(script.id)

    async def _charge_once(self, script: Script, key: str) -> None:
        await self._fortune.strike(script.id)
        dice = self._fortune.rnd.random()
        if dice < 0.1:
            raise Retry("refused", after=_BASE)
        self._stat["doubt"] += dice < 0.3
        if dice < 0.2:
            raise ConnectionError("no answer, and nothing happened")
        await self._provider.act(script, key)
        await self._fortune.strike(script.id)
        if dice < 0.3:
            raise ConnectionError("it happened, and no answer")

    async def _tally(self, batch: Batch[Tally], tx: Tx) -> None:
        told = [self._scripts[message.id] for message in batch]
        is_alone = len(told) == 1
        self._stat["batch of several"] += not is_alone
        for script in told:
            await self._begin(script, ATTEMPTS)
            await tx.session.execute(_INSIDE, self._deed(script))
            if script.end == "dies":
                raise Dead("told_to")
            if self._lone_failures[script.id] < script.failing_attempts:
                self._stat["culprit"] += not is_alone
                self._lone_failures[script.id] += is_alone
                raise RuntimeError("not this time")
        await self._fortune.strike(script.id)

    async def _begin(self, script: Script, attempt: int) -> None:
        self._begun[script.id] += 1
        await self._fortune.strike(script.id)
        if script.end == "kills":
            await self._fortune.crash("killed")
        await asyncio.sleep(script.seconds)
        await self._fortune.strike(script.id)
        if attempt <= script.failing_attempts:
            self._stat["failure"] += 1
            raise RuntimeError("not this time")

    def _deed(self, script: Script) -> dict[str, object]:
        return {
            "group": self.app.name,
            "id": script.id,
            "kind": script.kind,
            "key": script.key,
            "sequence": script.sequence,
        }
