"""Settling inside the transaction of a plain function's session, on its psycopg connection."""

import re
from typing import Any, Final
from uuid import UUID

from sqlalchemy import CursorResult, RowMapping
from sqlalchemy.orm import Session

from towpath.states import TaskState
from towpath.store.statements import load
from towpath.store.work import Work

_PARAMETER: Final = re.compile(r"\$(\d+)")


class SyncSettleStore:
    """The statements of `SettleStore.settle_in`, for threads."""

    def __init__(self, schema: str, group: str, worker_id: UUID) -> None:
        self._sql = load("work", schema)
        self._group = group
        self._worker_id = worker_id

    def settle_in(
        self, session: Session, work: Work, state: TaskState, reason_code: str | None, detail: str | None
    ) -> int | None:
        """The last statements of a handler's transaction. The caller commits, or rolls back on None.

        Returns how many followers it promoted; None when the token is gone.
        """
        row = self._row(
            session,
            "settle_one",
            self._group,
            work.id,
            work.token,
            state.value,
            work.source,
            work.lane,
            None,
            reason_code,
            detail,
        )
        if row is None:
            return None
        if state is not TaskState.SUCCEEDED:
            self._record(session, work, state, row, reason_code, detail)
        if work.lane is None:
            return 0
        is_head = row["is_head"]
        if not is_head and row["is_held"]:
            gate = self._row(session, "gate_head", self._group, work.source, work.lane)
            is_head = gate is not None and gate["head"] == work.id
        if not is_head:
            return 0
        lane = self._group, work.source, [work.lane]
        follower = self._row(session, "next_of_lanes", *lane)
        if follower is None:
            self._run(session, "open_gates", *lane)
            return 0
        self._run(session, "move_gates", *lane, [follower["id"]])
        self._run(session, "promote", self._group, [follower["id"]])
        return 1

    def _record(
        self,
        session: Session,
        work: Work,
        state: TaskState,
        row: RowMapping,
        reason_code: str | None,
        detail: str | None,
    ) -> None:
        self._run(
            session,
            "record_event",
            self._group,
            work.id,
            f"task.{state.value.lower()}",
            TaskState.RUNNING.value,
            state.value,
            row["version"],
            row["attempt"],
            row["run_no"],
            None,
            reason_code,
            "",
            detail or "",
            self._worker_id,
            work.trace,
        )

    def _row(self, session: Session, name: str, *arguments: object) -> RowMapping | None:
        return self._run(session, name, *arguments).mappings().first()

    def _run(self, session: Session, name: str, *arguments: object) -> CursorResult[Any]:
        named = {f"p{number}": value for number, value in enumerate(arguments, 1)}
        statement = _PARAMETER.sub(r"%(p\1)s", self._sql[name].replace("%", "%%"))
        return session.connection().exec_driver_sql(statement, named)
