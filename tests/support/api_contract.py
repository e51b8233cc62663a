"""Whether what the gateway answers is what its OpenAPI description says. No tests in here."""

import re
from typing import Any

import httpx2


class Contract:
    """The description of one gateway; `check` fails for an answer that it does not know."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._anywhere = set(re.findall(r"\w+_\w+", document["info"]["description"]))
        self._operations = [
            (re.compile(re.sub(r"{\w+}", "[^/]+", path)), method.upper(), operation)
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
        ]

    async def check(self, response: httpx2.Response) -> None:
        """An event hook for httpx2."""
        request = response.request
        path = request.url.raw_path.decode().partition("?")[0]
        for template, method, operation in self._operations:
            if method == request.method and template.fullmatch(path):
                await self._check(f"{method} {path}", operation["responses"], response)
                return

    async def _check(self, what: str, described: dict[str, Any], response: httpx2.Response) -> None:
        media_type = response.headers.get("content-type", "").partition(";")[0]
        code = None
        if media_type == "application/problem+json":
            await response.aread()
            code = response.json()["code"]
            if code in self._anywhere:
                return
        status = str(response.status_code)
        assert status in described, f"{what} answered {status}; described are {sorted(described)}"
        content = described[status].get("content", {})
        assert media_type in content or not content, f"{what} answered {status} as {media_type}; described are {sorted(content)}"
        if code is not None:
            assert code in described[status]["description"].split(", "), f"{what}: {code} is not described for {status}"
