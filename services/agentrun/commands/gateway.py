"""A gateway as commands see it: one question, one answer. What can be asked again is asked again while the gateway says 503."""

import time
from collections.abc import Mapping
from typing import Any

import httpx2

from agentrun.commands.access import Access
from agentrun.domain.errors import AgentrunError

TRIES = 4
PAUSE_SECONDS = 1.0


class GatewayRefused(AgentrunError):
    """The gateway refused, or it could not be reached. One line."""


class GatewayClient:
    """Asks one gateway with one key. Every request may be sent twice: it reads, or it does the same when it is repeated."""

    def __init__(self, access: Access, *, tries: int = TRIES) -> None:
        self._url = access.url
        self._tries = tries
        self._http = httpx2.Client(
            base_url=access.url, headers={"Authorization": f"Bearer {access.api_key}"}, timeout=30.0, trust_env=False
        )

    def __enter__(self) -> "GatewayClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int | bool | None] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """The answer, which is JSON. Members of `query` that are None are left out; `body` is sent as JSON. Raises GatewayRefused."""
        return dict(self._answer(method, path, query, headers, body).json())

    def text(self, method: str, path: str, *, query: Mapping[str, str | int | bool | None] | None = None) -> str:
        """An answer that is text, as it came. Raises GatewayRefused."""
        return self._answer(method, path, query, None, None).content.decode()

    def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str | int | bool | None] | None,
        headers: Mapping[str, str] | None,
        body: Mapping[str, Any] | None,
    ) -> httpx2.Response:
        params = {name: value for name, value in (query or {}).items() if value is not None}
        for turn in range(self._tries):
            if turn:
                time.sleep(PAUSE_SECONDS)
            try:
                response = self._http.request(method, path, params=params, headers=dict(headers or {}), json=body)
            except httpx2.HTTPError as error:
                refusal = f"the gateway {self._url} cannot be reached ({error or type(error).__name__}); see AGENTRUN_URL"
                continue
            if response.is_success:
                return response
            refusal = f"the gateway answered {response.status_code}: {_problem(response)}"
            if response.status_code != 503:
                break
        raise GatewayRefused(refusal)


def _problem(response: httpx2.Response) -> str:
    try:
        document = response.json()
        return f"{document['title']}. {document['detail']}"
    except (ValueError, KeyError, TypeError):
        return "no answer of an agentrun gateway; see AGENTRUN_URL"
