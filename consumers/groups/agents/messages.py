"""The tasks of the `agents` group. Producers import this module; it needs no consumer code.

`script` is how a demonstration or a test says what the provider does with a task: its n-th entry is
the answer to the n-th call, and after the last one the provider answers. See `provider.py`.
"""

from dataclasses import dataclass

import msgspec
from pydantic import BaseModel

from towpath.messages import task


@task("agent.model_call", group="agents", key="agent_id", unique=("agent_id", "step"))
class ModelCall(BaseModel):
    """Ask a model; steps of one agent run in the order they were committed."""

    agent_id: str
    step: int
    prompt: str
    model: str = "small"
    script: tuple[str, ...] = ()


@task("agent.retrieval", group="agents", key="agent_id", unique=("agent_id", "step"))
class Retrieval(msgspec.Struct, frozen=True):
    """Look something up for an agent."""

    agent_id: str
    step: int
    query: str
    collection: str = "docs"
    script: tuple[str, ...] = ()


@task("agent.tool_call", group="agents", key="agent_id", unique=("agent_id", "step"))
@dataclass(frozen=True)
class ToolCall:
    """Use a tool on behalf of an agent."""

    agent_id: str
    step: int
    tool: str
    argument: str = ""
    script: tuple[str, ...] = ()


AgentTask = ModelCall | Retrieval | ToolCall
