"""What the producer will do: 200 agent tasks and 300 order events in transactions, each with its fate.

Pure and seeded: every run tells the same story. Only the interleaving of the writers differs.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from consumers.groups.agents.provider import Step
from examples.demo.promises import INVOICE_LIMIT_CENTS, Scene

TASK_COUNT: Final = 200
EVENT_COUNT: Final = 300
ORDER_COUNT: Final = 75
AGENT_COUNT: Final = 25
ROLLED_BACK_SHARE: Final = 0.12
SAVEPOINT_SHARE: Final = 0.05
REPEAT_COUNT: Final = 12
OUTAGE: Final = "warehouse"
"""The tool that cannot be reached for a while."""
FAULTY: Final = "archive"
"""The collection whose search answers with an error until somebody mends it."""
LARGE_ORDER_COUNT: Final = 4
EXHAUSTED_COUNT: Final = 4
"""Of as many agents; of five, their breaker would open, and nobody would be given up any more."""
_BRIEF: Final[Sequence[tuple[Step, ...]]] = (
    ("timeout",),
    ("error",),
    ("rate_limit",),
    ("timeout", "error"),
    ("error", "timeout"),
)

Ending: TypeAlias = Literal["commit", "rollback", "savepoint"]
Kind: TypeAlias = Literal["model_call", "retrieval", "tool_call"]


@dataclass(frozen=True, slots=True)
class AgentStep:
    """One task of an agent."""

    key: str
    kind: Kind
    scene: Scene
    script: tuple[Step, ...] = ()


@dataclass(frozen=True, slots=True)
class OrderStep:
    """One event of an order."""

    key: str
    scene: Scene
    amount_cents: int
    failing_attempts: int = 0


Act: TypeAlias = AgentStep | OrderStep


@dataclass(frozen=True, slots=True)
class Transaction:
    """What one business transaction does, in the order of its keys so that writers cannot deadlock."""

    acts: tuple[Act, ...]
    ending: Ending
    given_up: tuple[Act, ...] = ()
    """Done inside a savepoint that is rolled back."""
    has_repeat: bool = False
    """Whether a client, unsure of its answer, submits the same task once more afterwards."""


def write_script(seed: int = 1) -> tuple[Transaction, ...]:
    """Every transaction, in the order in which writers take them up."""
    rng = random.Random(seed)
    acts: list[Act] = [*_agent_steps(), *_order_steps(rng)]
    # Alone in its transaction a message has its trace for itself.
    alone = [act for act in acts if act.scene == "exhausted"]
    together = [act for act in acts if act.scene != "exhausted"]
    rng.shuffle(together)
    transactions = [Transaction((act,), "commit") for act in alone]
    while together:
        size = rng.randint(1, 3)
        chosen, together = together[:size], together[size:]
        transactions.append(_with_savepoint(Transaction(_sorted(chosen), "commit"), rng))
    transactions += _rolled_back(transactions, rng)
    rng.shuffle(transactions)
    return tuple(_with_repeats(transactions))


def _scenes(count: int, special: Mapping[Scene, int]) -> list[Scene]:
    scenes = [scene for scene, number in special.items() for _ in range(number)]
    plain: list[Scene] = ["plain"] * (count - len(scenes))
    return scenes + plain


def _agent_steps() -> list[AgentStep]:
    """The same fates in each run: a fixed number of every scene, spread over the agents."""
    scenes = _scenes(TASK_COUNT, {"outage": 12, "exhausted": EXHAUSTED_COUNT, "rejected": 6, "brief": 36})
    kinds: tuple[Kind, ...] = ("model_call", "retrieval", "tool_call")
    forced: dict[Scene, Kind] = {"outage": "tool_call", "exhausted": "retrieval"}
    steps = []
    for number, scene in enumerate(scenes):
        key = f"agent-{number % AGENT_COUNT:02d}"
        script: tuple[Step, ...] = ()
        if scene == "brief":
            script = _BRIEF[number % len(_BRIEF)]
        elif scene == "rejected":
            script = ("refuse",)
        steps.append(AgentStep(key, forced.get(scene, kinds[number % len(kinds)]), scene, script))
    return steps


def _order_steps(rng: random.Random) -> list[OrderStep]:
    scenes = _scenes(EVENT_COUNT, {"rejected": 9, "brief": 36})
    steps = []
    for number, scene in enumerate(scenes):
        order = number % ORDER_COUNT
        # The last orders are too large for an invoice, and never rejected.
        amount = rng.randrange(1_000, 90_000, 100)
        if order >= ORDER_COUNT - LARGE_ORDER_COUNT:
            amount += INVOICE_LIMIT_CENTS
        failing_attempts = 1 + number % 2 if scene == "brief" else 0
        steps.append(
            OrderStep(f"order-{order:02d}", scene, 0 if scene == "rejected" else amount, failing_attempts)
        )
    return steps


def _sorted(acts: Sequence[Act]) -> tuple[Act, ...]:
    return tuple(sorted(acts, key=lambda act: act.key))


def _with_savepoint(transaction: Transaction, rng: random.Random) -> Transaction:
    if rng.random() >= SAVEPOINT_SHARE:
        return transaction
    return Transaction(transaction.acts, "savepoint", given_up=transaction.acts[-1:])


def _rolled_back(transactions: Sequence[Transaction], rng: random.Random) -> list[Transaction]:
    count = round(len(transactions) * ROLLED_BACK_SHARE)
    return [Transaction(each.acts, "rollback") for each in rng.sample(transactions, count)]


def _with_repeats(transactions: Sequence[Transaction]) -> list[Transaction]:
    left = REPEAT_COUNT
    repeated = []
    for each in transactions:
        first = each.acts[0]
        is_plain = isinstance(first, AgentStep) and first.scene == "plain"
        has_repeat = left > 0 and each.ending == "commit" and is_plain
        left -= has_repeat
        repeated.append(Transaction(each.acts, each.ending, each.given_up, has_repeat))
    return repeated
