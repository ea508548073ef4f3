"""`python -m workers.dashboard URL`: a page that shows queues and workers, and acts on them if it is allowed to."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import os
import signal
import sys
from collections.abc import Sequence
from typing import Final

from workers.errors import WorkersError
from workers.extras import extra_with, install
from workers.queue import Queue
from workers.storage import open_storage
from workers.terminal import show_escapes

try:
    from workers.dashboard.access import Access, AccessError
    from workers.dashboard.accounts import Role, hash_password, make_token, parse_accounts
    from workers.dashboard.application import queue_site
    from workers.dashboard.serving import DashboardServer, listen
except ModuleNotFoundError as error:
    extra = extra_with(error, part="dashboard")
    if extra is None:
        raise
    told = f"cannot be started: it needs the package {error.name!r}: {install(extra)}"
    print(told, file=sys.stderr)  # noqa: T201 - a command's answer
    sys.exit(2)

PORT: Final = 8765
ACCOUNTS_VARIABLE: Final = "WORKERS_DASHBOARD_ACCOUNTS"


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns 2 if it cannot be started like this."""
    show_escapes()
    options = make_parser().parse_args(arguments)
    if options.make_account:
        return _make_account(options.make_account, Role(options.role), token=options.token)
    if not options.urls:
        make_parser().error("the URL of a storage is missing")
    try:
        access = Access(
            accounts=parse_accounts(os.environ.get(ACCOUNTS_VARIABLE, "")),
            allow_actions=options.allow_actions,
            bind=options.bind,
            url=options.url,
        )
        queues = [Queue(open_storage(url, queue=name)) for url in options.urls for name in options.queue or [None]]
        asyncio.run(_serve(queues, access, options.port))
    except (AccessError, ValueError, WorkersError, OSError) as error:
        print(f"cannot be started: {error}", file=sys.stderr)  # noqa: T201 - a command's answer
        return 2
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return what reads the arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m workers.dashboard",
        description="Show queues and workers in a browser.",
        epilog=f"Without accounts it listens on loopback only and shows. {ACCOUNTS_VARIABLE} in the environment has"
        " accounts, separated by spaces: with one, everybody has to log in, and operators act.",
    )
    parser.add_argument("urls", metavar="URL", nargs="*", help="a storage, such as sqlite:///jobs.db")
    parser.add_argument("--queue", metavar="NAME", action="append", help="its queue; may be given several times")
    parser.add_argument("--bind", default="127.0.0.1", help="the address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=PORT, help="the port (%(default)s)")
    parser.add_argument("--url", help="what browsers call it, behind a proxy: https://dashboard.example")
    parser.add_argument("--allow-actions", action="store_true", help="without accounts: act, do not only show")
    parser.add_argument("--make-account", metavar="NAME", help="ask for a password, and print an account")
    parser.add_argument("--role", choices=[role.value for role in Role], default=Role.OPERATOR.value)
    parser.add_argument("--token", action="store_true", help="with --make-account: make a token, ask for no password")
    return parser


def _make_account(name: str, role: Role, *, token: bool) -> int:
    if token:
        secret, digest = make_token()
        print(f"the token, which is shown once: {secret}", file=sys.stderr)  # noqa: T201 - a command's answer
    else:
        password = getpass.getpass("Password: ") if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
        try:
            digest = hash_password(password)
        except ValueError as error:
            print(f"no account is made: {error}", file=sys.stderr)  # noqa: T201 - a command's answer
            return 2
    print(f"{name}:{role}:{digest}")  # noqa: T201 - a command's answer
    return 0


async def _serve(queues: Sequence[Queue], access: Access, port: int) -> None:
    site, catalog = queue_site(queues, access=access)
    listener = listen(access.bind, port)
    server = DashboardServer(site.app, before_stop=site.feed.end_streams, behind_proxy=access.is_behind_proxy)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.request_stop)
    at = f"http://{'[' + access.bind + ']' if ':' in access.bind else access.bind}:{listener.getsockname()[1]}"
    print(f"the dashboard is at {at}", file=sys.stderr, flush=True)  # noqa: T201 - a command's answer
    try:
        await server.serve(sockets=[listener])
    finally:
        listener.close()
        await site.close()
        await catalog.close()


if __name__ == "__main__":
    sys.exit(main())
