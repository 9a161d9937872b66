"""Outside providers that follow a script: they answer, time out, limit the rate, fail and refuse.

They stand in for model, search and tool vendors. What one does is decided by the message alone
(its script and how often it was called under the same idempotency key) and by the row of
`provider_status`, which anybody can change to begin or end an outage, or a fault that spoils every
answer of an otherwise reachable provider:

    insert into provider_status (provider, is_up) values ('tool:warehouse', false)
      on conflict (provider) do update set is_up = excluded.is_up;
    update provider_status set fault = 'error' where provider = 'search:archive';
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NoReturn, TypeAlias, get_args

from sqlalchemy import text
from sqlalchemy.ext.asyncio import AsyncEngine

Step: TypeAlias = Literal["ok", "timeout", "rate_limit", "error", "bad_request", "unauthorized", "refuse"]

RETRY_AFTER_SECONDS: Final = 1
_LATENCY_SECONDS: Final = 0.002
_TIMEOUT_SECONDS: Final = 0.05
_SEEN: Final = text("""
    insert into provider_call as c (idempotency_key, provider) values (:key, :provider)
    on conflict (idempotency_key) do update set calls = c.calls + 1, last_at = clock_timestamp()
    returning c.calls,
      coalesce((select s.is_up from provider_status s where s.provider = :provider), true),
      (select s.fault from provider_status s where s.provider = :provider)
""")
_STATUS: Final[Mapping[str, tuple[int, str]]] = {
    "rate_limit": (429, "too many requests"),
    "error": (503, "the provider is overloaded"),
    "bad_request": (400, "the request is malformed"),
    "unauthorized": (401, "the key was revoked"),
}


@dataclass(frozen=True)
class Response:
    """The part of an HTTP response that an error carries."""

    status_code: int
    headers: Mapping[str, str] = field(default_factory=dict)


class ProviderError(Exception):
    """A failed call, with the response as HTTP clients attach it."""

    def __init__(self, provider: str, response: Response, message: str) -> None:
        super().__init__(f"{provider} answered {response.status_code}: {message}")
        self.response = response


class ProviderRefused(Exception):
    """The provider understood and will not do it: asking again cannot help."""


class Provider:
    """Calls providers by name. Remembers nothing itself: several workers may share the tables."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine

    async def ask(self, provider: str, request: str, *, key: str, script: Sequence[str] = ()) -> str:
        """The provider's answer, the same for the same key and request.

        Raises ProviderError, ProviderRefused, TimeoutError or ConnectionError as the script says.
        """
        async with self._engine.connect() as connection:
            calls, is_up, fault = (await connection.execute(_SEEN, {"key": key, "provider": provider})).one()
        await asyncio.sleep(_LATENCY_SECONDS)
        if not is_up:
            raise ConnectionError(f"{provider} cannot be reached")
        step = fault or (script[calls - 1] if calls <= len(script) else "ok")
        if step != "ok":
            await _fail(provider, step)
        return hashlib.sha256(f"{provider}\n{request}".encode()).hexdigest()[:16]


async def _fail(provider: str, step: str) -> NoReturn:
    if step == "timeout":
        await asyncio.sleep(_TIMEOUT_SECONDS)
        raise TimeoutError(f"{provider} did not answer in time")
    if step == "refuse":
        raise ProviderRefused(f"{provider} refuses this request")
    if step not in _STATUS:
        raise ValueError(f"unknown step {step!r} in a script: use {', '.join(get_args(Step))}")
    status, message = _STATUS[step]
    headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if status == 429 else {}
    raise ProviderError(provider, Response(status, headers), message)
