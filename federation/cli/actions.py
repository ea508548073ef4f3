"""`federation actions`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from federation.cli.lists import print_list
from federation.cli.options import MOST_ROWS, AsJson, Columns, Limit, Wide, group
from federation.cli.output import print_json, print_lines
from federation.cli.session import with_database

if TYPE_CHECKING:
    from federation.admin.actions import ActionRow

app = group("What operators did: list.")


@app.command("list")
def list_actions(
    server: Annotated[str | None, typer.Option("--server", metavar="URL", help="Only those about this server.")] = None,
    limit: Limit = 50,
    after: Annotated[
        int | None, typer.Option("--after", metavar="ID", help="Go on after this action.", min=0, max=MOST_ROWS)
    ] = None,
    wide: Wide = False,
    columns: Columns = None,
    as_json: AsJson = False,
) -> None:
    """List who did what, when, and to how many things, the latest first. It is kept for a year."""
    from federation.admin import actions
    from federation.admin.servers.servers import server_url

    name = server_url(server) if server else None
    page = with_database(lambda database: actions.list_actions(database, server_url=name, limit=limit, after=after))
    if as_json:
        print_json(page)
        return
    print_list(
        ("ID", "AT", "WHO", "BY", "ACTION", "AFFECTED", "ENDED", "ARGUMENTS"),
        ((a.id, a.at, a.actor, a.source, a.action, a.affected, _end(a), _arguments(a)) for a in page.actions),
        few=("ID", "AT", "WHO", "ACTION", "AFFECTED"),
        wide=wide,
        chosen=columns,
    )
    if page.after:
        print_lines([f"more: --after {page.after}"])


def _end(action: ActionRow) -> str:
    if action.error is not None:
        return action.error
    return "yes" if action.finished_at is not None else "no"


def _arguments(action: ActionRow) -> str:
    return ", ".join(f"{name}: {_argument(value)}" for name, value in action.arguments.items())


def _argument(value: object) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
