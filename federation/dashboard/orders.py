"""Whom programs ask, who asks for what, for the audit log, and the command that does the same."""

from __future__ import annotations

import shlex
from typing import Annotated, Final, TypeAlias

from db import ActionSource
from federation.base.audit import Order
from federation.runtime.composition import Federation
from workers.dashboard.api import Caller, given
from workers.dashboard.visit import Visit

MOST_ROWS: Final = 2**63 - 1

Node: TypeAlias = Annotated[Federation, given(Federation)]
"""What FastAPI passes to a call."""


def ordered(visit: Visit, action: str, *, server_url: str | None = None, **arguments: object) -> Order:
    """Return the order of whoever has confirmed it on a page."""
    assert visit.visitor is not None  # nobody else acts
    return Order(
        actor=visit.visitor.name,
        source=ActionSource.DASHBOARD,
        action=action,
        arguments=arguments,
        server_url=server_url,
    )


def api_order(caller: Caller, action: str, *, server_url: str | None = None, **arguments: object) -> Order:
    """Return the order of a program."""
    return Order(actor=caller.name, source=ActionSource.API, action=action, arguments=arguments, server_url=server_url)


def command(*words: str, **options: str | None) -> str:
    """Return a command line that a shell takes as it is; options that are None are left out."""
    given = [*words]
    for name, value in options.items():
        if value is not None:
            given += [f"--{name.replace('_', '-')}", value]
    return shlex.join(["federation", *given])
