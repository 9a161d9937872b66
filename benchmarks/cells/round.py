"""One round: every trial runs once in it, however many cells look at it."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from benchmarks.measure import Sample
from benchmarks.orders import KEYS
from benchmarks.stage import Message, Stage, messages, random_keys

Result = TypeVar("Result")


@dataclass(frozen=True)
class Backlog:
    """Messages that wait in a topic. Several groups may read it."""

    topic: str
    messages: Sequence[Message]

    @property
    def ids(self) -> list[object]:
        return [message.id for message in self.messages]


@dataclass
class Round:
    """What was run and made in this round."""

    stage: Stage
    _begun: "dict[Callable[[Round], Any], asyncio.Task[Any]]" = field(default_factory=dict)

    async def sample(self, trial: "Trial") -> Sample:
        """Of a trial that ran already, runs, or begins now."""
        return await self.once(trial)

    async def once(self, run: "Callable[[Round], Coroutine[Any, Any, Result]]") -> Result:
        """What came of something that several trials look at."""
        if run not in self._begun:
            self._begun[run] = asyncio.create_task(run(self))
        result: Result = await self._begun[run]
        return result

    async def backlog(self, of: str, count: int) -> Backlog:
        """So many messages of a thousand keys in a new topic."""
        topic = self.stage.fresh_name(of)
        await self.stage.topic(topic, topic)
        made = messages(count, random_keys(KEYS))
        await self.stage.preload(topic, made)
        return Backlog(topic, made)

    def size(self, full: int, quick: int) -> int:
        """A number for the stage's scale."""
        return quick if self.stage.is_quick else full


Trial: TypeAlias = Callable[[Round], Coroutine[Any, Any, Sample]]
