"""Commands that set a node up and run it."""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

import typer

from federation import interrupts
from federation.cli.dashboard import beside
from federation.cli.options import AsJson, DashboardPort, MemoryLimit, MetricsPort, Processes, ShowPayloads, group
from federation.cli.output import lasting, print_json, print_lines
from federation.cli.problems import asked_for_json, fail
from federation.cli.queues import list_workers
from federation.cli.session import LogLevel, load_settings, number_lines, start_logging

if TYPE_CHECKING:
    from federation.base.settings.settings import Settings
    from federation.run import OpenBeside
    from workers.storage.sql import SqlStorage
    from workers.supervisor import Membership

DEFAULT_URL: Final = "http://127.0.0.1:8000"
LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
"""The hosts of a node for trying things out, and those to which such a node may send."""

workers = group("The delivering side.")
node = group("The inbound side.")


def add_to(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command("init")(init)
    app.command("run")(run_all)
    workers.command("list")(list_workers)
    app.add_typer(workers, name="workers")
    app.add_typer(node, name="node")


def init(
    url: Annotated[
        str | None,
        typer.Option(
            "--url", help=f"This node's own URL, under which others know it for good; by default {DEFAULT_URL}."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a .env with fresh keys and create the database.

    A database file that is made here gets minimal tables of a host application, too; any other is left to its host.
    What is there already stays as it is, and a node keeps its URL.
    """
    from db.migrate import is_blank
    from db.url import sqlite_file
    from federation.base.settings.settings import ENV_FILE, Settings

    wanted = _origin(url) if url is not None else None
    settings = load_settings()
    if wanted and settings.better_auth_url not in (None, wanted):
        fail(f"this node is {settings.better_auth_url} already, says BETTER_AUTH_URL of .env or the environment; "
             "a node that others know keeps its URL, and another one gets a directory of its own")  # fmt: skip
    own_url = wanted or settings.better_auth_url or DEFAULT_URL
    chosen = wanted is not None or settings.better_auth_url is not None
    wrote = _write_env(own_url)
    if not as_json:
        keys = f"wrote {ENV_FILE} with fresh keys for {own_url}; keep it secret"
        print_lines([keys if wrote else f"{ENV_FILE} exists and stays as it is"])
    settings = Settings.load()
    if settings.better_auth_url is None:
        fail(
            f"{ENV_FILE} is there already, and not a node's: make the node in a folder of its own, or add to "
            f"{ENV_FILE} BETTER_AUTH_URL={own_url} and the keys that `federation keys generate FILE` writes"
        )
    settings.require_identity()
    if not as_json:
        print_lines(_about_the_url(settings, chosen=chosen))
    file = sqlite_file(settings.database_url.get_secret_value())
    upgraded = upgrade(settings, host_tables=file is not None and is_blank(file))
    if as_json:
        print_json({"url": settings.better_auth_url, "wrote_env": wrote, **asdict(upgraded)})
        return
    print_lines([*upgraded.told(), "the database is ready; `federation run` starts the node"])


def _origin(url: str) -> str:
    from federation.protocol.urls import canonical_origin

    if "://" not in url:
        fail("--url: the scheme must be http or https, as in https://node.example or, here, http://127.0.0.1:8451")
    origin = canonical_origin(url)
    parts = urlsplit(url)
    if parts.path not in ("", "/") or parts.query or parts.fragment:
        fail(f"{url} has a path; a node is known by scheme, host and port alone, as {origin}")
    return origin


def _about_the_url(settings: Settings, *, chosen: bool) -> list[str]:
    """Tell what follows from the node's URL, where a newcomer would not expect it."""
    from federation.protocol.urls import host_of

    told = []
    if not chosen:
        told.append(
            "nobody said --url, and others know a node by its URL for good: as long as it has met none, remove .env, "
            "and `federation init --url URL` makes another"
        )
    hosts = _of_this_machine(host_of(settings.better_auth_url or ""))
    if hosts:
        told.append(
            "only this machine reaches it, and it may send to this machine (DEV_ALLOWED_HOSTNAMES)"
            if settings.dev_allowed_hostnames & set(hosts)
            else f"only this machine reaches it, and it sends nothing to this machine: set DEV_ALLOWED_HOSTNAMES, as "
            f"{','.join(hosts)}"
        )
    return told


def _of_this_machine(host: str) -> tuple[str, ...]:
    """Return the names under which this machine is its own peer, if that host is one of them; else none."""
    if host in LOOPBACK:
        return LOOPBACK
    try:
        return (*LOOPBACK, host) if ip_address(host).is_loopback else ()
    except ValueError:
        return ()


def _write_env(own_url: str) -> bool:
    """Write the `.env` of a new node. Return False if there is one, which stays as it is."""
    from federation.base.settings.settings import DEFAULT_DATABASE_URL, ENV_FILE, write_env_file
    from federation.protocol.keys import generate_own_keys
    from federation.protocol.urls import host_of

    values = {"BETTER_AUTH_URL": own_url, **generate_own_keys().to_env(), "DATABASE_URL": DEFAULT_DATABASE_URL}
    if port := urlsplit(own_url).port:
        values["FEDERATION_PORT"] = str(port)
    if hosts := _of_this_machine(host_of(own_url)):
        values["DEV_ALLOWED_HOSTNAMES"] = ",".join(hosts)
    try:
        write_env_file(ENV_FILE.absolute(), values)
    except FileExistsError:
        return False
    except PermissionError as error:
        fail(f"the folder {ENV_FILE.absolute().parent} cannot be written ({error.strerror}); "
             "change to one of your own, or give this user the right to write there")  # fmt: skip
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgraded:
    """What an upgrade did about the host application's tables: those it made, and those still missing."""

    host_tables_made: tuple[str, ...]
    host_missing: tuple[str, ...]

    def told(self) -> list[str]:
        """Return the same in sentences for people."""
        from federation.base.settings.reach import HOST_ADVICE, host_lacks

        made = [f"made minimal host tables: {', '.join(self.host_tables_made)}"] if self.host_tables_made else []
        return [*made, *([f"{host_lacks(self.host_missing)}: {HOST_ADVICE}"] if self.host_missing else [])]


def upgrade(settings: Settings, *, host_tables: bool = False) -> Upgraded:
    """Upgrade the tables of the application and of its queues to this version; with `host_tables` make a host's, too.

    Raises:
        ConfigurationError: something that an earlier upgrade had made is missing.
        HostTablesError: tables of the host's own are in the way of ours.
    """
    from db import migrate
    from federation.base.queues.queue import queue_names
    from federation.base.queues.storages import open_storage
    from workers.storage.sql import SqlStorage

    url = settings.database_url.get_secret_value()
    with lasting("upgrading the tables"):
        made = migrate.upgrade(url, host_tables=host_tables)
        for queue in queue_names(settings):
            storage = open_storage(settings, queue)
            if isinstance(storage, SqlStorage):
                interrupts.run(_prepare(storage))
    return Upgraded(host_tables_made=made, host_missing=interrupts.run(_confirm(url)))


async def _confirm(url: str) -> tuple[str, ...]:
    """Return which of the host's tables are missing.

    None of ours may be: no migration restores what was removed after it.
    """
    from db import Database
    from federation.base.settings.reach import missing_host_tables, require_schema

    database = Database(url)
    try:
        await require_schema(database)
        return await missing_host_tables(database)
    finally:
        await database.close()


async def _prepare(storage: SqlStorage) -> None:
    """Make the queue known to its database, so that nobody has to write that later, perhaps in an open transaction."""
    await storage.migrate()
    await storage.connect()
    await storage.disconnect()


def run_all(
    metrics_port: MetricsPort = None,
    dashboard_port: DashboardPort = None,
    show_payloads: ShowPayloads = False,
    as_json: AsJson = False,
) -> None:
    """Deliver and serve, in one process.

    Runs until SIGTERM or Ctrl-C; a second signal skips the grace.
    """
    opened = beside(dashboard_port, shows_texts=show_payloads)
    _run(deliver=True, serve=True, metrics_port=metrics_port, opened=opened, as_json=as_json)


@workers.command("run")
def run_workers(
    metrics_port: MetricsPort = None,
    dashboard_port: DashboardPort = None,
    show_payloads: ShowPayloads = False,
    processes: Processes = None,
    memory_limit: MemoryLimit = None,
    as_json: AsJson = False,
) -> None:
    """Deliver until stopped.

    Stops on SIGTERM or Ctrl-C; a second signal skips the grace. With --processes, SIGHUP replaces them one by one.
    """
    from workers.supervisor import Membership

    membership = Membership.inherited()
    if membership is not None:
        _run(deliver=True, serve=False, metrics_port=metrics_port, as_json=False, membership=membership)
    elif processes is not None:
        if dashboard_port is not None or show_payloads:
            fail("--dashboard-port is for one process; beside several, run `federation dashboard`")
        supervise(processes, memory_limit=memory_limit, metrics_port=metrics_port, as_json=as_json)
    elif memory_limit is not None:
        fail("--memory-limit is for each of several processes: add --processes, 1 of them if you like")
    else:
        opened = beside(dashboard_port, shows_texts=show_payloads)
        _run(deliver=True, serve=False, metrics_port=metrics_port, opened=opened, as_json=as_json)


@node.command("serve")
def serve(metrics_port: MetricsPort = None, as_json: AsJson = False) -> None:
    """Serve until stopped.

    Stops on SIGTERM or Ctrl-C; a second signal skips the grace.
    """
    _run(deliver=False, serve=True, metrics_port=metrics_port, as_json=as_json)


def _run(
    *,
    deliver: bool,
    serve: bool,
    as_json: bool,
    metrics_port: int | None = None,
    opened: OpenBeside | None = None,
    membership: Membership | None = None,
) -> None:
    from federation.run import run

    settings = load_settings(node=True)
    start_logging(LogLevel.INFO)
    if membership is not None:
        number_lines(membership.number)
        membership.end_with_parent(settings.federation_lease)
    interrupts.run(
        run(settings, workers=deliver, node=serve, metrics_port=metrics_port, membership=membership, beside=opened)
    )
    if as_json:
        print_json({"stopped": True})


def supervise(processes: str, *, memory_limit: str | None, metrics_port: int | None, as_json: bool) -> None:
    """Run this command in several processes until stopped, and end with the supervisor's status.

    This process loads neither settings nor anything that works: it stays small, and the children see what is wrong.
    """
    import structlog

    from workers.supervisor import Command, Plan, Supervisor, parse_bytes, parse_processes

    start_logging(LogLevel.INFO)
    log = structlog.get_logger("federation.supervisor")
    plan = Plan(
        processes=parse_processes(processes),
        memory_limit=None if memory_limit is None else parse_bytes(memory_limit),
        metrics_port=metrics_port,
    )
    command = Command(arguments=(sys.executable, *sys.orig_argv[1:]))
    log.info("supervisor_started", processes=plan.processes)
    status = interrupts.run(Supervisor(command, plan, report=log.log).run())
    if status == 1 and asked_for_json():
        fail("the processes died in a loop, or had to be killed; the log says more", status=status)
    if status:
        sys.exit(status)
    if as_json:
        print_json({"stopped": True})
