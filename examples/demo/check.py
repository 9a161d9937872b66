"""Whether all promises were kept, by comparing the producer's own account with the database, id by id.

python -m examples.demo.check --promises promises.json      # exit code 1: at least one was not
"""

import argparse
import asyncio
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import asyncpg

from examples.demo import findings
from examples.demo import promises as account
from examples.demo.findings import Findings
from examples.demo.promises import INVOICE_LIMIT_CENTS, ORDERS, Promise, Promises
from towpath.settings import load
from towpath.states import TaskState
from towpath.store.database import plain_url

_SHOWN: Final = 5


@dataclass(slots=True)
class Claim:
    """One sentence that is true or not, with the figure behind it and what speaks against it."""

    text: str
    figure: str = ""
    problems: list[str] = field(default_factory=list)

    @property
    def is_true(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.problems


async def check(connection: "asyncpg.Connection[Any]", promises: Promises) -> list[Claim]:
    """Every claim, true or not. Reads only."""
    async with connection.transaction(isolation="repeatable_read", readonly=True):
        found = await findings.read(connection)
    return judge(found, promises)


def judge(found: Findings, promises: Promises) -> list[Claim]:
    """Every claim about what was found, true or not."""
    return [
        _all_ended(found, promises),
        _nothing_else(found, promises),
        _effects_once(found, promises),
        _invoices_once(found, promises),
        _in_order(found, promises),
        _dead_came_back(found, promises),
        _business_agrees(found, promises),
    ]


def _all_ended(found: Findings, promises: Promises) -> Claim:
    claim = Claim("every committed message reached its end")
    for promise in promises.committed:
        state = found.tasks.get((promise.group, promise.message_id), "missing")
        if state != promise.end:
            claim.problems.append(f"{_name(promise)} is {state}, not {promise.end}")
    for message_id, (order_id, state) in found.invoice_tasks.items():
        if state != TaskState.SUCCEEDED:
            claim.problems.append(f"the invoice of {order_id} ({message_id}) is {state}")
    ends = Counter(promise.end for promise in promises.committed)
    claim.figure = ", ".join(f"{count} {end}" for end, count in sorted(ends.items(), reverse=True))
    claim.figure += f"; {len(found.invoice_tasks)} follow-up events SUCCEEDED"
    return claim


def _nothing_else(found: Findings, promises: Promises) -> Claim:
    claim = Claim("nothing that was rolled back exists, nor anything else")
    promised = {(promise.group, promise.message_id) for promise in promises.committed}
    happened = {(group, message_id) for group, effects in found.effects.items() for message_id, _ in effects}
    for promise in promises.rolled_back:
        mine = (promise.group, promise.message_id)
        if mine in found.tasks or mine in happened or promise.message_id in found.outbox_ids:
            claim.problems.append(f"{_name(promise)} was rolled back and exists")
    for group, message_id in sorted(found.tasks.keys() - promised):
        claim.problems.append(f"nobody committed the task {message_id} of {group}")
    for group, message_id in sorted(happened - promised):
        claim.problems.append(f"nobody committed the cause of the effect {message_id} of {group}")
    ids = {message_id for _, message_id in promised} | found.invoice_tasks.keys()
    claim.problems += [f"nobody committed the message {each}" for each in sorted(found.outbox_ids - ids)]
    claim.figure = (
        f"{len(promises.rolled_back)} messages of {promises.rolled_back_count} rolled-back transactions and "
        f"{promises.savepoint_count} savepoints; {promises.repeat_count} repeated submits made no task"
    )
    return claim


def _effects_once(found: Findings, promises: Promises) -> Claim:
    claim = Claim("each effect is there exactly once")
    counts = {group: Counter(message_id for message_id, _ in found.effects[group]) for group in found.effects}
    for promise in promises.committed:
        count = counts[promise.group][promise.message_id]
        wanted = 1 if promise.end == TaskState.SUCCEEDED else 0
        if count != wanted:
            claim.problems.append(f"{_name(promise)} took effect {count} times, not {wanted}")
    claim.figure = ", ".join(f"{counts[group].total()} of {group}" for group in sorted(counts))
    return claim


def _invoices_once(found: Findings, promises: Promises) -> Claim:
    claim = Claim("each paid order is billed exactly once")
    wanted = promises.invoices_cents
    for order_id, cents in wanted.items():
        count = found.invoices[order_id, cents]
        if count != 1:
            claim.problems.append(f"{order_id} was billed {count} times over {cents} cents")
    surplus = found.invoices.keys() - wanted.items()
    claim.problems += [
        f"{order_id} was billed {cents} cents and owes them not" for order_id, cents in sorted(surplus)
    ]
    asked = Counter(order_id for order_id, _ in found.invoice_tasks.values())
    claim.problems += [
        f"{asked[order_id]} invoices were asked for {order_id}, not {int(order_id in wanted)}"
        for order_id in sorted(asked.keys() | wanted.keys())
        if asked[order_id] != int(order_id in wanted)
    ]
    claim.figure = f"{found.invoices.total()} invoices"
    return claim


def _in_order(found: Findings, promises: Promises) -> Claim:
    """Commit order per key. Who died is passed by its followers on purpose, and is compared apart."""
    claim = Claim("effects of one key came in commit order")
    by_id = {promise.message_id: promise for promise in promises.committed}
    lanes: defaultdict[tuple[str, str, bool], list[int]] = defaultdict(list)
    for group, effects in found.effects.items():
        for message_id, key in effects:
            if (promise := by_id.get(message_id)) is not None:
                lanes[group, key, (group, message_id) in found.dead].append(promise.step)
    for (_, key, _), steps in sorted(lanes.items()):
        if steps != sorted(steps):
            claim.problems.append(f"{key} took its steps in the order {steps}")
    keys = {(group, key) for group, key, _ in lanes}
    claim.figure = f"{len(keys)} keys, while handlers retried"
    return claim


def _dead_came_back(found: Findings, promises: Promises) -> Claim:
    claim = Claim("what died was replayed, and nothing else had died")
    too_large = {
        order_id for order_id, cents in promises.invoices_cents.items() if cents > INVOICE_LIMIT_CENTS
    }
    wanted = {(promise.group, promise.message_id) for promise in promises.committed if promise.dies_first}
    wanted |= {(ORDERS, each) for each, (order_id, _) in found.invoice_tasks.items() if order_id in too_large}
    claim.problems += [
        f"{message_id} of {group} never died" for group, message_id in wanted - found.dead.keys()
    ]
    claim.problems += [f"{message_id} of {group} died" for group, message_id in found.dead.keys() - wanted]
    for (group, message_id), state in found.dead.items():
        if state != "replayed":
            claim.problems.append(f"the dead letter of {message_id} of {group} is {state}")
    if found.copy_count < len(wanted):
        claim.problems.append(f"{found.copy_count} copies went to the broker's dead-letter topics")
    claim.figure = f"{len(found.dead)} dead letters, each with a copy at the broker"
    return claim


def _business_agrees(found: Findings, promises: Promises) -> Claim:
    claim = Claim("the business tables tell the same story")
    committed = Counter(promise.key for promise in promises.committed)
    accepted: defaultdict[str, int] = defaultdict(int)
    for promise in promises.committed:
        if promise.group == ORDERS and promise.end == TaskState.SUCCEEDED:
            accepted[promise.key] = max(accepted[promise.key], promise.step)
    for key in sorted(committed.keys() | found.steps.keys()):
        if committed[key] != found.steps.get(key, 0):
            claim.problems.append(
                f"{key} counts {found.steps.get(key, 0)} steps, {committed[key]} were committed"
            )
    for order_id, position in sorted(accepted.items()):
        if found.projection.get(order_id) != position:
            claim.problems.append(
                f"{order_id} is projected at {found.projection.get(order_id)}, not {position}"
            )
    claim.figure = f"{len(found.steps)} agents and orders"
    return claim


def lines(claims: Iterable[Claim]) -> Iterator[str]:
    """The verdict for people."""
    for claim in claims:
        yield f"{'ok ' if claim.is_true else 'NO '} {claim.text}: {claim.figure}"
        for problem in claim.problems[:_SHOWN]:
            yield f"      {problem}"
        if len(claim.problems) > _SHOWN:
            yield f"      and {len(claim.problems) - _SHOWN} more"


def _name(promise: Promise) -> str:
    return f"step {promise.step} of {promise.key} ({promise.message_id})"


async def _main(promises_path: Path) -> bool:
    connection = await asyncpg.connect(plain_url(load().database_url.get_secret_value()))
    try:
        claims = await check(connection, account.read(promises_path))
    finally:
        await connection.close()
    for line in lines(claims):
        print(line)
    return all(claim.is_true for claim in claims)


def main() -> None:
    """Check the database that TOWPATH_DATABASE_URL names; exit code 1 when a claim is false."""
    parser = argparse.ArgumentParser(description="Hold the promises against the database.")
    parser.add_argument("--promises", type=Path, required=True)
    sys.exit(not asyncio.run(_main(parser.parse_args().promises)))


if __name__ == "__main__":
    main()
