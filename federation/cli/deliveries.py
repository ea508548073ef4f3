"""`federation deliveries`."""

from __future__ import annotations

from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Final, TypeAlias

import typer

from federation.cli.lists import SHORTEST, print_list, shortened
from federation.cli.options import AsJson, Columns, Limit, OlderThan, ServerUrl, Wide, Yes, group
from federation.cli.orders import order
from federation.cli.output import confirm, print_json, print_lines, print_table, progress, shown
from federation.cli.problems import NOT_FOUND, fail
from federation.cli.session import with_database, with_node
from federation.cli.tail import tail

if TYPE_CHECKING:
    from collections.abc import Sequence

    from federation.admin.attempts import LoggedAttempt
    from federation.admin.deliveries.bulk import BulkDeliveries
    from federation.admin.deliveries.deliveries import AttemptRow, Selection
    from federation.base.audit import Order
    from federation.runtime.composition import Federation

app = group("Deliveries, owed or given up: list, show, stats, tail, retry, drop, hold, release.")
app.command("tail")(tail)


class State(StrEnum):
    """Open means owed: ready or held. Failed and expired mean given up, and kept for a week."""

    OPEN = "open"
    READY = "ready"
    HELD = "held"
    FAILED = "failed"
    EXPIRED = "expired"


class Retryable(StrEnum):
    """The states of deliveries that may be owed again."""

    FAILED = "failed"
    EXPIRED = "expired"
    HELD = "held"


def _url(text: str | None) -> str | None:
    """Return the URL, or refuse it as wrong usage."""
    from federation.protocol.errors import UrlError
    from federation.protocol.urls import canonical_origin

    try:
        if text is not None:
            canonical_origin(text)
    except UrlError as error:
        raise typer.BadParameter(str(error)) from None
    return text


Ids: TypeAlias = Annotated[
    list[str] | None, typer.Argument(metavar="[ID]...", help="Only these deliveries.", show_default=False)
]
Server: TypeAlias = Annotated[str | None, typer.Option("--server", metavar="URL", help="Only those to this server.")]
InState: TypeAlias = Annotated[
    State | None,
    typer.Option("--state", help="Ready: to be sent. Held: waiting. Open: both. Failed, expired: given up."),
]
Code: TypeAlias = Annotated[
    str | None, typer.Option("--code", help="Only those whose last attempt failed with this, as TIMEOUT or HTTP_500.")
]
Activity: TypeAlias = Annotated[
    str | None, typer.Option("--activity", metavar="ID", help="Only those of this activity, by the URL that is its id.")
]
Inbox: TypeAlias = Annotated[
    str | None, typer.Option("--inbox", metavar="URL", callback=_url, help="Only those to this inbox.")
]
All: TypeAlias = Annotated[bool, typer.Option("--all", help="Every one; needed where nothing else is chosen.")]


_COLUMNS: Final = (
    *("ID", "FULL ID", "SERVER", "STATE", "ATTEMPTS", "AGE", "CODE"),
    *("HELD FOR", "SINCE", "UNTIL", "MADE", "LAST ATTEMPT", "ERROR", "ACTIVITY", "ACTOR"),
)
_FEW: Final = ("ID", "STATE", "AGE", "CODE", "SERVER")


@app.command("list")
def list_deliveries(
    server: Server = None,
    state: InState = None,
    code: Code = None,
    older_than: OlderThan = None,
    activity: Activity = None,
    inbox: Inbox = None,
    limit: Limit = 50,
    after: Annotated[str | None, typer.Option("--after", metavar="ID", help="Go on after this delivery.")] = None,
    wide: Wide = False,
    columns: Columns = None,
    as_json: AsJson = False,
) -> None:
    """List deliveries, in the order of their ids. Commands that ask for an id take what ID shows of it."""
    from dataclasses import replace

    from federation.admin.deliveries import deliveries
    from federation.admin.words import ago

    chosen = replace(_selection(None, server, state, code, older_than), activity_id=activity, inbox=inbox)
    page = with_database(lambda database: deliveries.list_deliveries(database, chosen, limit=limit, after=after))
    if as_json:
        print_json(page)
        return
    now = datetime.now(UTC)
    print_list(
        _COLUMNS,
        (
            (short, d.id, d.server_url or d.target_url, d.state, d.attempts, ago(now - d.created_at), d.error_code,
             d.held_reason, d.held_at, d.held_until, d.created_at, d.last_attempted_at, (d.last_error or "")[:80],
             d.activity_id, d.actor)
            for short, d in zip(shortened([d.id for d in page.deliveries]), page.deliveries, strict=True)
        ),
        few=_FEW,
        wide=wide,
        chosen=columns,
    )  # fmt: skip
    if page.after:
        print_lines([f"more: --after {page.after}"])


@app.command("show")
def show(
    delivery_id: Annotated[str, typer.Argument(metavar="ID", show_default=False)], as_json: AsJson = False
) -> None:
    """Show one delivery and its attempts. Never its text. Of one without a row, what the log of attempts knows."""
    from federation.admin.deliveries import deliveries

    (delivery_id,) = _whole([delivery_id])
    found = with_database(lambda database: deliveries.show(database, delivery_id))
    if found is None:
        _show_gone(delivery_id, as_json=as_json)
        return
    delivery, attempts = found
    if as_json:
        print_json({"delivery": delivery, "state": delivery.state, "attempts": attempts})
        return
    print_table(
        ("", delivery.id),
        [
            ("state", delivery.state),
            ("held for", delivery.held_reason),
            ("held since", delivery.held_at),
            ("held until", delivery.held_until),
            ("job", delivery.job_name),
            ("target", delivery.target_url),
            *((("activity", delivery.activity_id), ("actor", delivery.actor)) if delivery.activity_id else ()),
            ("made", delivery.created_at),
            ("ordering key", delivery.ordering_key),
            ("series", delivery.series),
            ("attempts", delivery.attempts),
            ("last attempt", delivery.last_attempted_at),
            ("given up", delivery.settled_at),
            ("code", delivery.error_code),
            ("error", delivery.last_error),
        ],
    )
    _print_attempts(attempts)


def _show_gone(delivery_id: str, *, as_json: bool) -> None:
    from db import AttemptOutcome
    from federation.admin.attempts import attempts_at_delivery

    latest = with_database(lambda database: attempts_at_delivery(database, delivery_id)).rows
    if not latest:
        fail(
            f"there is no delivery {delivery_id} and no attempt at it: it is dropped or purged, or never was; "
            "one that was delivered is found by its whole id",
            status=NOT_FOUND,
        )
    attempts = latest[::-1]
    delivered = latest[0].outcome is AttemptOutcome.DELIVERED
    if as_json:
        print_json({"delivery": None, "state": "delivered" if delivered else "gone", "attempts": attempts})
        return
    how = "delivered" if delivered else "dropped, or given up and purged"
    print_lines([f"{delivery_id} was {how}: it has no row any more, and these are its attempts in the log"])
    if activity := next((each.activity_id for each in latest if each.activity_id), None):
        print_lines([f"it sent the activity {activity}"])
    _print_attempts(attempts)


def _print_attempts(attempts: Sequence[AttemptRow | LoggedAttempt]) -> None:
    columns = ("SERIES", "ATTEMPT", "AT", "OUTCOME", "CODE", "STATUS", "IT SAID", "MS", "RELAYED BY")
    rows = (
        (
            a.series,
            a.attempt,
            a.started_at,
            a.ended,
            a.code,
            a.http_status,
            a.remote_code,
            a.duration_ms,
            a.relayed_by,
        )
        for a in attempts
    )
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
    from federation.admin.deliveries import deliveries
    from federation.admin.words import counted

    chosen = _selection(None, server, state, code, older_than)
    found = with_database(lambda database: deliveries.stats(database, chosen, servers=servers))
    if as_json:
        print_json(found)
        return
    print_table(
        ("STATE", "DELIVERIES", "OF THEM"),
        [
            ("ready", found.ready, ""),
            (
                "held",
                found.held,
                ", ".join(f"{reason.value}: {number}" for reason, number in found.held_by_reason.items()),
            ),
            ("failed", found.failed, ", ".join(f"{code}: {number}" for code, number in found.codes.items())),
            ("expired", found.expired, ""),
            ("owed", found.open, ", ".join(f"{number} {age.value}" for age, number in found.ages.items() if number)),
        ],
    )
    if found.oldest_open is not None:
        held = f"; held for {counted(found.held_servers, 'server')}" if found.held else ""
        print_lines([f"the oldest that is owed was made {shown(found.oldest_open)}{held}"])
    if found.servers:
        columns = ("SERVER", "READY", "HELD", "FAILED", "EXPIRED", "OLDEST")
        rows = ((s.server_url, s.ready, s.held, s.failed, s.expired, s.oldest) for s in found.servers)
        print_table(columns, rows)


@app.command("retry")
def retry(
    ids: Ids = None,
    server: Server = None,
    state: Annotated[
        Retryable | None, typer.Option("--state", help="Only those. Without it: failed and expired ones.")
    ] = None,
    code: Code = None,
    older_than: OlderThan = None,
    everything: All = False,
    as_json: AsJson = False,
) -> None:
    """Owe deliveries again that were given up, with fresh attempts.

    Held ones too, if their ids or `--state held` say so; to send all that is held for a server: `deliveries release`.
    If a younger delivery of the same ordering key follows, a delivery is left alone: sent now, it would undo what the
    younger one does. The command may be stopped at any time; repeated, it does the rest. The outbox sweeper completes
    what a crash leaves half done.
    """
    from federation.admin.deliveries import deliveries
    from federation.admin.deliveries.bulk import retryable

    chosen = _chosen(_selection(ids, server, State(state.value) if state else None, code, older_than), everything)
    wanted = [*chosen.conditions(), retryable(chosen)]
    total = with_database(lambda database: deliveries.count(database, wanted))
    if not total:
        fail("no delivery that was given up is chosen", status=NOT_FOUND)
    with progress(total, "retrying") as bar:
        asked = _order("retry", chosen)
        done = with_node(lambda federation: _bulk(federation).retry(chosen, progress=bar, order=asked))
    if as_json:
        print_json(done)
    else:
        left = f"; {done.left} left, which a Node producer wrote: retry their jobs there" if done.left else ""
        behind = f"; {done.out_of_order} left, which would be out of order" if done.out_of_order else ""
        print_lines([f"{_counted(done.retried)} owed again{left}{behind}{_named(ids, chosen)}"])
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

    Those that a worker is just trying stay as they are, and are counted as busy. The command may be stopped at any
    time; repeated, it does the rest.
    """
    from federation.admin.deliveries import deliveries
    from federation.admin.words import counted

    chosen = _chosen(_selection(ids, server, state, code, older_than), everything)
    total = with_database(lambda database: deliveries.count(database, chosen.conditions()))
    if not total:
        fail("no delivery is chosen", status=NOT_FOUND)
    named = _named(ids, chosen)
    confirm(f"Drop {counted(total)}{named}? What is dropped cannot be brought back.", yes=yes)
    with progress(total, "dropping") as bar:
        asked = _order("drop", chosen)
        done = with_node(lambda federation: _bulk(federation).drop(chosen, progress=bar, order=asked))
    if as_json:
        print_json(done)
    else:
        busy = f"; {done.busy} being tried at this moment, and left" if done.busy else ""
        print_lines([f"{_counted(done.dropped)} dropped{busy}{named}"])
    if not done.dropped:
        raise typer.Exit(NOT_FOUND)


def _named(ids: Sequence[str] | None, chosen: Selection) -> str:
    """Name the chosen deliveries if the end of an id stood for one of them."""
    return "" if chosen.ids == tuple(ids or ()) else f" ({', '.join(chosen.ids)})"


def _counted(number: int) -> str:
    return "1 delivery is" if number == 1 else f"{number} deliveries are"


def _order(verb: str, chosen: Selection) -> Order:
    return order(
        f"deliveries {verb}",
        server_url=chosen.server_url,
        ids=chosen.ids,
        state=chosen.state,
        code=chosen.code,
        older_than=chosen.older_than,
    )


def _bulk(federation: Federation) -> BulkDeliveries:
    from federation.admin.deliveries.bulk import BulkDeliveries

    return BulkDeliveries(federation.database, federation.delivery_queues)


def _selection(
    ids: list[str] | None, server: str | None, state: State | None, code: str | None, older_than: str | None
) -> Selection:
    from db import DeliveryState
    from federation.admin.deliveries.deliveries import OPEN, Selection
    from federation.admin.servers.servers import server_url
    from federation.base.settings.types import parse_duration

    return Selection(
        ids=_whole(ids) if ids else (),
        server_url=server_url(server) if server else None,
        state=OPEN if state is State.OPEN else DeliveryState(state.value) if state else None,
        code=code,
        older_than=parse_duration(older_than) if older_than else None,
    )


def _whole(ids: Sequence[str]) -> tuple[str, ...]:
    """Return the ids of which these are the ends; one that is nothing's stays as it is."""
    from federation.admin.deliveries import deliveries

    try:
        return with_database(lambda database: deliveries.whole_ids(database, ids, shortest=SHORTEST))
    except ValueError as error:
        fail(str(error))


def _chosen(selection: Selection, everything: bool) -> Selection:
    """Return the selection, but refuse one that selects everything unless `--all` says so."""
    if selection.is_everything and not everything:
        fail("say which: ids, --server, --state, --code, --older-than, or --all")
    return selection


@app.command("hold")
def hold(url: ServerUrl, as_json: AsJson = False) -> None:
    """Hold deliveries to a server, until `release`.

    New ones are held as well, and nothing is lost. Attempts under way go on.
    """
    from federation.admin.deliveries import holds
    from federation.admin.servers.servers import server_url

    name = server_url(url)
    asked = order("deliveries hold", server_url=name)
    owed = with_node(lambda federation: holds.hold(federation, name, order=asked))
    if as_json:
        print_json({"url": name, "owed": owed})
    else:
        print_lines(
            [f"deliveries to {name} are held ({owed} owed now); `federation deliveries release {name}` sends them"]
        )


@app.command("release")
def release(
    url: Annotated[
        str | None,
        typer.Argument(metavar="[URL]", help="The server: https://peer.example, or peer.example.", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="For every server, and at once.")] = False,
    as_json: AsJson = False,
) -> None:
    """Send what is held for a server, whatever is known of it.

    Its link counts as up, and an operator's hold or a pause that it asked for is over. If it is still down, the link
    goes down again. Deliveries go out slowly at first. With `--all` every hold is over, and every held delivery has a
    job in the queue when the command ends; those that wait for an older one follow it.
    """
    from db import DeliveryState
    from federation.admin.deliveries import deliveries, holds
    from federation.admin.servers.servers import server_url

    if everything == (url is not None):
        fail("say which: a URL, or --all")
    if url is not None:
        name = server_url(url)
        asked = order("deliveries release", server_url=name)
        done = with_node(lambda federation: holds.release(federation, name, order=asked))
    else:
        held = [deliveries.is_in(DeliveryState.HELD)]
        total = with_database(lambda database: deliveries.count(database, held))
        with progress(total, "releasing") as bar:
            asked = order("deliveries release", all=True)
            done = with_node(lambda federation: holds.release_all(federation, progress=bar, order=asked))
    if as_json:
        print_json(done)
        return
    behind = f"; {done.in_order} more wait for an older one, and follow it" if done.in_order else ""
    print_lines([f"{_counted(done.released)} released{behind}"])


@app.command("expire")
def expire(as_json: AsJson = False) -> None:
    """Give up what is held for too long, now.

    That is longer than FEDERATION_DELIVERY_MAX_AGE. It is done by itself, but not for 24 hours of sweeping after more
    than an hour passed between two sweeps: the clock may have been set. This says that it is right, and ends that time.
    """
    from federation.admin.deliveries import holds

    expired = with_node(lambda federation: holds.expire(federation, order=order("deliveries expire")))
    if as_json:
        print_json({"expired": expired})
    else:
        print_lines([f"{_counted(expired)} given up as too old; what gets too old from now on is given up by itself"])
