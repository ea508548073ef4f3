"""Somebody with a browser that keeps cookies and sends forms, and runs no scripts."""

from __future__ import annotations

import html
import re
from urllib.parse import urlencode

import httpx
from starlette.types import ASGIApp

BASE = "http://localhost:8765"


class Person:
    """Looks at pages and sends their forms, as a browser without scripts does."""

    def __init__(self, app: ASGIApp, *, base: str = BASE, address: str = "127.0.0.1", **headers: str) -> None:
        transport = httpx.ASGITransport(app=app, client=(address, 50_000), raise_app_exceptions=True)
        self.client = httpx.AsyncClient(transport=transport, base_url=base, headers=headers)

    async def sees(self, path: str, *, status: int | None = 200) -> str:
        """The page, as HTML; None stands for any status."""
        answer = await self.client.get(path)
        assert status in (None, answer.status_code), (answer.status_code, answer.text[:2000])
        return answer.text

    async def token(self, path: str) -> str:
        """What the forms of that page carry."""
        return token_in(await self.sees(path))

    async def sends(self, path: str, *fields: tuple[str, str], page: str, **headers: str) -> httpx.Response:
        """A form with these fields, from a page that carries the token."""
        return await self.posts(path, ("form_token", await self.token(page)), *fields, **headers)

    async def posts(self, path: str, *fields: tuple[str, str], **headers: str) -> httpx.Response:
        """These fields, as they are."""
        kind = {"content-type": "application/x-www-form-urlencoded"}
        return await self.client.post(path, content=urlencode(fields), headers={**kind, **headers})

    async def confirms(self, asked: httpx.Response) -> httpx.Response:
        """The form of a page that asks before an action, as its first button sends it."""
        assert asked.status_code == 200, asked.text
        action = re.search(r'<form class="confirm" method="post" action="([^"]+)"', asked.text)
        assert action is not None, asked.text
        found = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', asked.text)
        return await self.posts(html.unescape(action[1]), *((html.unescape(a), html.unescape(b)) for a, b in found))

    @property
    def cookies(self) -> dict[str, str | None]:
        return {cookie.name: cookie.value for cookie in self.client.cookies.jar}

    def takes_cookies_of(self, other: Person) -> None:
        """Somebody has copied them, or planted them."""
        for cookie in other.client.cookies.jar:
            self.client.cookies.jar.set_cookie(cookie)

    async def logs_in(self, name: str, secret: str, **headers: str) -> httpx.Response:
        return await self.sends("/login", ("name", name), ("secret", secret), page="/login", **headers)


def token_in(page: str) -> str:
    found = re.search(r'name="form_token" value="([0-9a-f]+)"', page)
    assert found is not None, page
    return found[1]
