"""Who gives a command, for the audit log."""

from __future__ import annotations

import os
import pwd
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from federation.base.audit import Order


def order(action: str, *, server_url: str | None = None, **arguments: object) -> Order:
    """Return the order for a command that somebody types here; its arguments as they were typed, without secrets."""
    from db import ActionSource
    from federation.base.audit import Order

    return Order(actor=operator(), source=ActionSource.CLI, action=action, arguments=arguments, server_url=server_url)


def operator() -> str:
    """Return who runs this process, as `alice@host`; behind sudo also for whom, as `root (alice)@host`.

    The kernel says who it is, because the environment may say anything; only sudo's word is taken from that, as root's.
    """
    user = os.geteuid()
    try:
        name = pwd.getpwuid(user).pw_name
    except KeyError:  # as in many containers
        name = f"uid {user}"
    behind = os.environ.get("SUDO_USER") if user == 0 else None
    return f"{name}{f' ({behind})' if behind else ''}@{socket.gethostname()}"
