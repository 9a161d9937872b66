"""The `agents` group: each step of an agent is one outside call, in order per agent."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from sqlalchemy import text

from consumers.groups.agents.messages import AgentTask, ModelCall, Retrieval, ToolCall
from consumers.groups.agents.provider import Provider, ProviderRefused
from towpath.app import App
from towpath.backoff import RetryPolicy
from towpath.context import Call
from towpath.outcomes import Reject
from towpath.settings import load
from towpath.store.database import async_engine

app = App(
    "agents",
    ordering="key",
    retry=RetryPolicy(attempts=5, max_age="1h", base="250ms", cap="2s"),
)
PATIENT = RetryPolicy(attempts=40, max_age="1h", base="250ms", cap="2s")
"""For tools: they are somebody's machines and go away for a while now and then."""

app.classify(ProviderRefused, Reject("provider_refused"))

_RECORD: Final = text("""
    insert into agent_effect (message_id, agent_id, step, kind, result, attempt)
    values (:message_id, :agent_id, :step, :kind, :result, :attempt)
""")


@asynccontextmanager
async def provider() -> AsyncIterator[Provider]:
    """The scripted providers keep their side of the story in the business database."""
    engine = async_engine(
        load().database_url.get_secret_value(),
        isolation_level="AUTOCOMMIT",
        pool_size=4,
        max_overflow=12,
    )
    try:
        yield Provider(engine)
    finally:
        await engine.dispose()


app.provide(Provider, provider)


@app.idempotent(timeout="30s", dependency="model")
async def run_model(request: ModelCall, call: Call, *, provider: Provider) -> None:
    """Ask the model and keep its answer."""
    key = call.idempotency_key("complete")
    answer = await provider.ask(f"model:{request.model}", request.prompt, key=key, script=request.script)
    await call.progress(0.9, step="answered")
    await _record(call, request, "model_call", answer)


@app.idempotent(timeout="10s", dependency="search")
async def retrieve(request: Retrieval, call: Call, *, provider: Provider) -> None:
    """Look documents up and keep what was found."""
    key = call.idempotency_key("search")
    found = await provider.ask(f"search:{request.collection}", request.query, key=key, script=request.script)
    await _record(call, request, "retrieval", found)


@app.idempotent(timeout="30s", dependency="tools", retry=PATIENT)
async def use_tool(request: ToolCall, call: Call, *, provider: Provider) -> None:
    """Use a tool and keep its output."""
    key = call.idempotency_key("invoke")
    output = await provider.ask(f"tool:{request.tool}", request.argument, key=key, script=request.script)
    await _record(call, request, "tool_call", output)


async def _record(call: Call, request: AgentTask, kind: str, result: str) -> None:
    """Write the effect in the transaction that ends the task."""
    async with call.transaction() as tx:
        await tx.session.execute(
            _RECORD,
            {
                "message_id": call.message_id,
                "agent_id": request.agent_id,
                "step": request.step,
                "kind": kind,
                "result": result,
                "attempt": call.attempt.attempt,
            },
        )
