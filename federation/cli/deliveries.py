"""`federation deliveries`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer

from federation.cli.options import AsJson, Limit, OlderThan, Yes, group
from federation.cli.output import confirm, print_json, print_lines, print_table, progress
from federation.cli.problems import NOT_FOUND, fail
from federation.cli.session import with_database, with_node

if TYPE_CHECKING:
    from federation.admin.deliveries import Selection
    from federation.admin.deliveries_bulk import BulkDeliveries
    from federation.app import Federation

app = group("Deliveries, owed or failed: list, show, stats, retry, drop.")


class State(StrEnum):
    """Open: owed. Failed: given up, kept for a week."""

    OPEN = "open"
    FAILED = "failed"


Ids: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Only these deliveries.", show_default=False)
]
Server: TypeAlias = Annotated[str | None, typer.Option("--server", metavar="URL", help="Only those to this server.")]
InState: TypeAlias = Annotated[State | None, typer.Option("--state", help="Open: owed. Failed: given up.")]
Code: TypeAlias = Annotated[
    str | None, typer.Option("--code", help="Only those that failed with this code, such as TIMEOUT or HTTP_500.")
]
All: TypeAlias = Annotated[bool, typer.Option("--all", help="Every one; needed where nothing else is chosen.")]


@app.command("list")
def list_deliveries(
    server: Server = None,
    state: InState = None,
    code: Code = None,
    older_than: OlderThan = None,
    limit: Limit = 50,
    after: Annotated[str | None, typer.Option("--after", metavar="ID", help="Go on after this delivery.")] = None,
    as_json: AsJson = False,
) -> None:
    """List deliveries, in the order of their ids."""
    from federation.admin import deliveries

    chosen = _selection(None, server, state, code, older_than)
    page = with_database(lambda database: deliveries.list_deliveries(database, chosen, limit=limit, after=after))
    if as_json:
        print_json(page)
        return
    columns = ("ID", "SERVER", "STATE", "CODE", "ATTEMPTS", "MADE", "LAST ATTEMPT", "ERROR")
    print_table(
        columns,
        (
            (d.id, d.server_url or d.target_url, d.state, d.error_code, d.attempts, d.created_at, d.last_attempted_at,
             (d.last_error or "")[:80])
            for d in page.deliveries
        ),
    )  # fmt: skip
    if page.after:
        print_lines([f"more: --after {page.after}"])


@app.command("show")
def show(
    delivery_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)], as_json: AsJson = False
) -> None:
    """Show one delivery and its attempts. Never its text."""
    from federation.admin import deliveries

    found = with_database(lambda database: deliveries.show(database, delivery_id))
    if found is None:
        fail(f"there is no delivery {delivery_id}: it is delivered, dropped or purged, or never was", status=NOT_FOUND)
    delivery, attempts = found
    if as_json:
        print_json({"delivery": delivery, "state": delivery.state, "attempts": attempts})
        return
    print_table(
        ("", delivery.id),
        [
            ("state", delivery.state),
            ("job", delivery.job_name),
            ("target", delivery.target_url),
            ("made", delivery.created_at),
            ("attempts", delivery.attempts),
            ("last attempt", delivery.last_attempted_at),
            ("given up", delivery.settled_at),
            ("code", delivery.error_code),
            ("error", delivery.last_error),
        ],
    )
    columns = ("ATTEMPT", "AT", "OUTCOME", "CODE", "STATUS", "MS", "RELAYED BY")
    rows = ((a.attempt, a.started_at, a.outcome, a.code, a.http_status, a.duration_ms, a.relayed_by) for a in attempts)
    print_table(columns, rows)


@app.command("stats")
def stats(
    server: Server = None,
    state: InState = None,
    code: Code = None,
    older_than: OlderThan = None,
    servers: Annotated[int, typer.Option("--servers", min=0, max=10_000, help="How many servers to name.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Count deliveries by state, age, code and server."""
    from federation.admin import deliveries

    chosen = _selection(None, server, state, code, older_than)
    found = with_database(lambda database: deliveries.stats(database, chosen, servers=servers))
    if as_json:
        print_json(found)
        return
    print_table(
        ("STATE", "DELIVERIES", "OF THEM"),
        [
            ("open", found.open, ", ".join(f"{number} {age.value}" for age, number in found.ages.items() if number)),
            ("failed", found.failed, ", ".join(f"{number} {code}" for code, number in found.codes.items())),
        ],
    )
    if found.servers:
        columns = ("SERVER", "OPEN", "FAILED", "OLDEST")
        print_table(columns, ((each.server_url, each.open, each.failed, each.oldest) for each in found.servers))


@app.command("retry")
def retry(
    ids: Ids = None,
    server: Server = None,
    code: Code = None,
    older_than: OlderThan = None,
    everything: All = False,
    as_json: AsJson = False,
) -> None:
    """Owe failed deliveries again, with fresh attempts.

    May be stopped at any time, and repeated: it does the rest. What a crash leaves in between the outbox sweeper ends.
    """
    from federation.admin import deliveries

    chosen = _chosen(_selection(ids, server, State.FAILED, code, older_than), everything)
    total = with_database(lambda database: deliveries.count(database, chosen.conditions()))
    if not total:
        fail("no failed delivery is chosen", status=NOT_FOUND)
    with progress(total, "retrying") as bar:
        done = with_node(lambda federation: _bulk(federation).retry(chosen, progress=bar))
    if as_json:
        print_json(done)
    else:
        left = f"; {done.left} left, which a Node producer wrote: retry their jobs there" if done.left else ""
        print_lines([f"{done.retried} deliveries are owed again{left}"])
    if not done.retried:
        raise typer.Exit(NOT_FOUND)


@app.command("drop")
def drop(
    ids: Ids = None,
    server: Server = None,
    state: InState = None,
    code: Code = None,
    older_than: OlderThan = None,
    everything: All = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Give deliveries up, for good: row, text and job.

    Those that a worker is just trying stay as they are, and are counted as busy. May be stopped at any time, and
    repeated: it does the rest.
    """
    from federation.admin import deliveries

    chosen = _chosen(_selection(ids, server, state, code, older_than), everything)
    total = with_database(lambda database: deliveries.count(database, chosen.conditions()))
    if not total:
        fail("no delivery is chosen", status=NOT_FOUND)
    confirm(f"Drop {total} deliveries? They cannot be brought back.", yes=yes)
    with progress(total, "dropping") as bar:
        done = with_node(lambda federation: _bulk(federation).drop(chosen, progress=bar))
    if as_json:
        print_json(done)
    else:
        busy = f"; {done.busy} are being tried at this moment and stay" if done.busy else ""
        print_lines([f"{done.dropped} deliveries are dropped{busy}"])
    if not done.dropped:
        raise typer.Exit(NOT_FOUND)


def _bulk(federation: Federation) -> BulkDeliveries:
    from federation.admin.deliveries_bulk import BulkDeliveries

    return BulkDeliveries(federation.database, federation.delivery_queue)


def _selection(
    ids: list[str] | None, server: str | None, state: State | None, code: str | None, older_than: str | None
) -> Selection:
    from federation.admin.deliveries import DeliveryState, Selection
    from federation.admin.servers import server_url
    from federation.base.setting_types import parse_duration

    return Selection(
        ids=tuple(ids or ()),
        server_url=server_url(server) if server else None,
        state=DeliveryState(state.value) if state else None,
        code=code,
        older_than=parse_duration(older_than) if older_than else None,
    )


def _chosen(selection: Selection, everything: bool) -> Selection:
    """The selection, refused if it is all there is and nobody said so."""
    if not everything and not (selection.ids or selection.server_url or selection.code or selection.older_than):
        fail("say which: ids, --server, --code, --older-than, or --all")
    return selection
