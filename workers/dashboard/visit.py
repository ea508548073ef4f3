"""One request, as the code of a page sees it."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, TypeAlias
from urllib.parse import parse_qsl, unquote

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from workers.dashboard.access import Visitor
from workers.dashboard.cookies import BrowserSession
from workers.dashboard.feed import Parameters
from workers.dashboard.rendering import Templates

LARGEST_FORM: Final = 256 * 1024
LARGEST_UPLOAD: Final = 8 << 20
MOST_PARTS: Final = 20
MOST_FIELDS: Final = 1_100
SEE_OTHER: Final = 303
CONFIRMED: Final = "confirmed"
FORM_TOKEN: Final = "form_token"  # noqa: S105 - the name of a field
UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
"""Characters that no database stores."""

_BOUNDARY: Final = re.compile(r"boundary=\"?([0-9A-Za-z'()+_,./:=?-]{1,70})\"?")
_PART_NAME: Final = re.compile(rb'form-data;[^\r\n]*?\bname="([^"\r\n]{1,100})"')

Fields: TypeAlias = Sequence[tuple[str, str]]


class Refusal(Exception):
    """The request is refused, with this status and a sentence for whoever asked."""

    def __init__(self, status: int, told: str) -> None:
        super().__init__(told)
        self.status = status
        self.told = told


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionTaken:
    """A line of the log of what was done through the dashboard: by whom, what, to what, and to how many of these.

    `by_api` tells whether a program asked for it, and not somebody on a page.
    """

    by: str
    action: str
    subject: str
    affected: int
    problem: str | None = None
    by_api: bool = False


Record: TypeAlias = Callable[[ActionTaken], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """The question before an action: what it does to how many, and the command that does the same."""

    question: str
    rows: str
    verb: str
    back: str
    command: str | None = None
    warning: str | None = None
    is_grave: bool = False


@dataclass(slots=True, kw_only=True)
class Visit:
    """A request; `form` has the fields of a form that was sent from a page of ours, `file` the file with it.

    `visitor` is None only on the page where one logs in. The browser keeps `session` when it is another one at the end.
    """

    request: Request
    visitor: Visitor | None
    session: BrowserSession
    templates: Templates
    record_action: Record
    form_token: str
    notes: dict[str, str]  # by session: what is said once, on the next page
    form: Fields = ()
    file: bytes = b""

    @property
    def query(self) -> Mapping[str, str]:
        return self.request.query_params

    @property
    def address(self) -> str:
        """The other side of the connection."""
        return self.request.client.host if self.request.client else ""

    @property
    def is_confirmed(self) -> bool:
        """Whether the question before the action has been answered."""
        return self.field(CONFIRMED) == "yes"

    def field(self, name: str, default: str = "") -> str:
        """Return a field of the form."""
        return next((value for key, value in self.form if key == name), default)

    def carried(self, name: str) -> str:
        """Return the text that a field carries (`rendering.carried`): browsers change ends of lines in plain ones."""
        return uncarried(self.field(name))

    def all_carried(self, name: str) -> list[str]:
        """Return the texts of all fields that have the name, each once."""
        return [*dict.fromkeys(uncarried(value) for key, value in self.form if key == name)]

    def page(
        self,
        template: str,
        values: Mapping[str, object] = MappingProxyType({}),
        *,
        status: int = 200,
        live: str | None = None,
        parameters: Parameters = (),
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Return a page; `live` is the topic that it listens to while it is open."""
        note = self.notes.pop(self.session.id, None) if status == 200 else None
        text = self.templates.render(
            template,
            visitor=self.visitor,
            path=self.request.url.path,
            form_token=self.form_token,
            note=note,
            stream=self.templates.stream(live, parameters),
            **values,
        )
        return HTMLResponse(text, status_code=status, headers=dict(headers or {}))

    def confirm(self, asked: Confirmation) -> Response:
        """Return the page that asks before the action; its form repeats this one, confirmed."""
        again = [pair for pair in self.form if pair[0] not in (FORM_TOKEN, CONFIRMED)]
        return self.page("confirm.html", {"asked": asked, "action": self.request.url.path, "fields": again})

    def back(self, path: str, told: str) -> Response:
        """Send the browser to a page of ours, which says once what has been done."""
        while len(self.notes) >= 1_000:
            self.notes.pop(next(iter(self.notes)))
        self.notes[self.session.id] = told
        return RedirectResponse(path, status_code=SEE_OTHER)

    async def record(self, action: str, subject: str, affected: int, *, problem: str | None = None) -> None:
        """Write to the log what the visitor has done."""
        assert self.visitor is not None  # nobody else acts
        done = ActionTaken(by=self.visitor.name, action=action, subject=subject, affected=affected, problem=problem)
        await self.record_action(done)


PageCode: TypeAlias = Callable[[Visit], Awaitable[Response]]


def uncarried(value: str) -> str:
    """Return the text that a hidden field carries.

    Raises:
        Refusal: no database stores it.
    """
    text = unquote(value)
    check_storable([text])
    return text


def check_storable(texts: Iterable[str]) -> None:
    """Accept texts that a database stores.

    Raises:
        Refusal: one of them has a character that none does; the database would say that it has failed.
    """
    if any(UNSTORABLE.search(text) for text in texts):
        raise Refusal(400, "There is no such thing: its name has a character that nothing stores.")


async def read_form(request: Request) -> Fields:
    """Read the form that a browser has sent.

    Raises:
        Refusal: it is no form, or too large.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        raise Refusal(415, "That is not a form of this dashboard.")
    body = await read_body(request, LARGEST_FORM)
    try:
        fields = parse_qsl(body.decode("ascii"), keep_blank_values=True, max_num_fields=MOST_FIELDS)
    except ValueError:
        raise Refusal(400, "The form cannot be read.") from None
    check_storable(value for _, value in fields)
    return fields


async def read_upload(request: Request) -> tuple[Fields, bytes]:
    """Read a form that carries a file. Return its fields, and the file.

    Raises:
        Refusal: it is no such form, or too large.
    """
    kind = request.headers.get("content-type", "")
    found = _BOUNDARY.search(kind)
    if kind.partition(";")[0].strip().lower() != "multipart/form-data" or found is None:
        raise Refusal(415, "That is not a form of this dashboard.")
    body = await read_body(request, LARGEST_UPLOAD)
    parts = (b"\r\n" + body).split(b"\r\n--" + found[1].encode(), MOST_PARTS)
    fields, file = list[tuple[str, str]](), b""
    for part in parts[1:]:
        head, _, content = part.partition(b"\r\n\r\n")
        name = _PART_NAME.search(head)
        if name is None:
            continue
        if b"filename=" in head:
            file = content
        else:
            fields.append((name[1].decode("ascii", "replace"), content.decode("utf-8", "replace")))
    check_storable(value for _, value in fields)
    return fields, file


async def read_body(request: Request, largest: int) -> bytes:
    """Read what was sent.

    Raises:
        Refusal: it is too large; what is left of it was not read.
    """
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > largest:
            raise Refusal(413, f"This is too large: more than {largest // 1024} KiB.")
    return bytes(body)
