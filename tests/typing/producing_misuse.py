"""Mistakes in producing that a type checker points out; type-checked, never run."""

from dataclasses import dataclass

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import Session

import towpath
from towpath import emit, event, submit, task, tasks


@event("page.viewed", destination="views")
@dataclass
class PageViewed:
    url: str


@task("report.build", group="reports")
@dataclass
class BuildReport:
    name: str


event("page.viewed")  # rejected: no destination
task("report.build")  # rejected: no group
towpath.emits()  # rejected: there is no such name
PageViewed(address="/")  # rejected: the class keeps its signature


def on_an_engine(engine: Engine) -> None:
    emit(engine, PageViewed("/"))  # rejected: an engine is no transaction


def with_wrong_options(session: Session) -> None:
    emit(session, PageViewed("/"), key=1.5)  # rejected: no key
    emit(session, PageViewed("/"), headers={"a": 1})  # rejected: no header
    emit(session, PageViewed("/"), message_id="1")  # rejected: no UUID
    emit(session, PageViewed("/"), at="tomorrow")  # rejected: an instant
    emit(session, PageViewed("/"), delay=5)  # rejected: a number has no unit
    submit(session, BuildReport("r"), deadline=5)  # rejected: a number has no unit
    print(submit(session, BuildReport("r")).unknown)  # rejected: no such attribute
    tasks.get(session, "1", group="reports")  # rejected: no UUID


async def without_await(session: AsyncSession) -> None:
    print(submit(session, BuildReport("r")).id)  # rejected: not awaited
    await emit(session, PageViewed("/"))  # rejected: nothing to await
