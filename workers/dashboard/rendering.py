"""Templates: Jinja's, with text of strangers made harmless wherever it is printed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Final
from urllib.parse import quote, urlencode

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, select_autoescape

from workers.dashboard import charts, text
from workers.dashboard.feed import Parameters

STATIC_PACKAGE: Final = "workers.dashboard"
STATIC_TYPES: Final = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MenuItem:
    """A page that the menu leads to, from every page."""

    title: str
    path: str


class Templates:
    """Renders the pages of the packages named, and the parts of pages that change while they are open."""

    def __init__(self, packages: Sequence[str], *, title: str, menu: Iterable[MenuItem], shows_only: bool) -> None:
        self._environment = Environment(
            loader=ChoiceLoader([PackageLoader(package) for package in packages]),
            autoescape=select_autoescape(default=True),
            undefined=StrictUndefined,
            finalize=text.shown,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.globals.update(
            title=title, menu=tuple(menu), shows_only=shows_only, charts=charts, static=static_path
        )
        self._environment.filters.update(
            short=text.short,
            ending=text.ending,
            seams=text.seams,
            block=text.block,
            coded=text.coded,
            grouped=text.grouped,
            counted=text.counted,
            milliseconds=text.milliseconds,
            or_none=text.or_none,
            moment=text.moment,
            ago=text.ago,
            since=text.since,
            query=query,
            carried=carried,
        )

    def render(self, template: str, **values: object) -> str:
        """Render a template; what it prints and is not given is an error."""
        return self._environment.get_template(template).render(**values)

    def stream(self, topic: str | None, parameters: Parameters) -> str | None:
        """Return the address of a topic's events."""
        return None if topic is None else f"/live?{urlencode([('topic', topic), *parameters])}"


def query(parameters: Mapping[str, object]) -> str:
    """Return the parameters as the query of an address, without those that are None."""
    return urlencode([(name, str(value)) for name, value in parameters.items() if value is not None])


def carried(value: str) -> str:
    """Return a text as a hidden field carries it, whatever is in it; `Visit.carried` returns the text."""
    return quote(value, safe="")


@cache
def static_file(name: str) -> bytes | None:
    """Return a file of the dashboard's own that browsers load; None if there is none of that name."""
    stem, _, kind = name.rpartition(".")
    if not stem.isidentifier() or kind not in STATIC_TYPES:
        return None
    found = files(STATIC_PACKAGE).joinpath("static", name)
    return found.read_bytes() if found.is_file() else None


@cache
def static_path(name: str) -> str:
    """Return the file's address, which changes with its content, so that browsers may keep it for ever."""
    content = static_file(name)
    assert content is not None, name
    return f"/static/{hashlib.sha256(content).hexdigest()[:12]}/{name}"
