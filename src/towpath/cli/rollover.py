"""`towpath broker rollover`: use partitions or queues that were added or taken away, while nothing runs."""

from typing import Annotated

import typer

from towpath.cli.options import Actor, Because, Json, actor_name, text
from towpath.cli.output import as_json, clean
from towpath.cli.session import connected, run_async
from towpath.cli.topology import admin_of_settings, app_of, broker_number, queues_of_settings, topology_of
from towpath.errors import UsageError
from towpath.store.groups import GroupStore
from towpath.store.provenance import ProvenanceStore


def rollover(
    address: Annotated[
        str | None, typer.Argument(help="Kafka: the topic that partitions were added to.")
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            "--app", metavar="MODULE:APP", help="RabbitMQ: the group whose queues_per_group changed."
        ),
    ] = None,
    reason: Because = "",
    actor: Actor = None,
    json: Json = False,
) -> None:
    """Place keys by the partitions a topic has now, or spread a group over the queues the settings say.

    Without relays, after every group has read to the end; of a group with other queues no member may run.

    towpath broker rollover orders --reason "12 partitions instead of 6"
    """
    who, why = actor_name(actor), text(reason, "--reason")
    if (address is None) == (target is None):
        raise UsageError("say what was changed: a topic (Kafka), or --app billing.consumer:app (RabbitMQ)")
    if target is not None:
        told, line = run_async(_change_queues(text(target, "--app"), who, why))
    else:
        told, line = run_async(_use_partitions(text(address or "", "ADDRESS", 200), who, why))
    if json:
        as_json(told)
    else:
        print(clean(line))


async def _use_partitions(topic: str, who: str, why: str) -> tuple[dict[str, object], str]:
    async with admin_of_settings() as admin:
        count = len(await admin.bounds(topic))
    if not count:
        raise UsageError("this broker has no partitions: give --app where a group gets other queues")
    async with connected() as session:
        store = ProvenanceStore(session.schema)
        before = await store.roll_over(
            session.connection, broker_number(), topic, count, actor=who, reason=why
        )
    if before is None:
        line = f"{topic}: nothing was published there yet; the first relay notes its {count} partitions"
    else:
        line = f"{topic}: keys are placed by {count} partitions, {before} before"
    return {"address": topic, "before": before, "partitions": count}, line


async def _change_queues(target: str, who: str, why: str) -> tuple[dict[str, object], str]:
    app, queues = app_of(target), queues_of_settings()
    if queues is None:
        raise UsageError("groups have no queues at this broker: name the topic that partitions were added to")
    async with connected() as session, session.connection.transaction():
        store = GroupStore(app.name, session.schema)
        before, tasks = await store.begin_rollover(session.connection)
        if tasks and app.ordering == "partition":
            raise UsageError(
                f"{tasks} tasks of {app.name} stand in the order of its queues: let them end first"
            )
        if before is None:
            raise UsageError(f"nothing is known of {app.name}'s queues: towpath broker apply --app {target}")
        async with admin_of_settings() as admin:
            await admin.change_queues(await topology_of(session, app), before)
        await store.finish_rollover(session.connection, before, queues, actor=who, reason=why)
    told = {"group": app.name, "before": before, "queues": queues}
    return told, f"{app.name}: {queues} queues per address, {before} before"
