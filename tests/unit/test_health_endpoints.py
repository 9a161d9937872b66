"""The health endpoints and whoever may ask them."""

from collections.abc import Mapping
from urllib.parse import quote

import httpx
import pytest

from tests.integration.test_cli_hostile import CORPUS
from towpath.serving import _endpoints

HOSTILE = {**CORPUS, "version": "application/openmetrics-text; version=abc", "list": ";;,=,;q=x"}


class Probe:
    """All is well."""

    def liveness(self) -> Mapping[str, object]:
        return {"ok": True}

    readiness = liveness


@pytest.mark.parametrize("kind", HOSTILE)
async def test_hostile_strings_in_a_request_change_no_answer(kind: str) -> None:
    """X2: in the path, the query and the headers."""
    raw = HOSTILE[kind].encode("utf-8", "surrogatepass")[:10_000]
    transport = httpx.ASGITransport(_endpoints(Probe()))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        for path in ("/livez", "/readyz", "/metrics"):
            answer = await client.get(f"{path}?x={quote(raw)}", headers={"accept": raw, "x-probe": raw})
            assert answer.status_code == 200, path
        assert (await client.get(f"/a{quote(raw)}")).status_code == 404
        assert (await client.post("/livez", content=raw)).status_code == 405
