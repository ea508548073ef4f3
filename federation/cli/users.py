"""`federation users`."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from federation.cli.options import AsJson, Limit, group
from federation.cli.orders import order
from federation.cli.output import print_json, print_lines, print_table
from federation.cli.problems import NOT_FOUND, fail
from federation.cli.session import with_database

if TYPE_CHECKING:
    from federation.admin.users import LocalUser

app = group("Users of a node without a host application: add, list.")


class Policy(StrEnum):
    """Who gets a user's posts; see `db.User`."""

    ALL = "all"
    FOLLOWERS = "followers"
    NONE = "none"


@app.command("add")
def add(
    user_id: Annotated[str, typer.Argument(metavar="ID", help="What others follow, as alice.", show_default=False)],
    private: Annotated[bool, typer.Option("--private", help="Follows wait to be accepted.")] = False,
    posts_to: Annotated[
        Policy, typer.Option("--posts-to", help="Servers of whoever follows or is followed; of followers; of nobody.")
    ] = Policy.ALL,
    as_json: AsJson = False,
) -> None:
    """Add a user, where no host application does."""
    from federation.admin import users

    user = users.LocalUser(id=user_id, is_private=private, post_propagation_policy=posts_to.value)
    try:
        asked = order("users add", id=user_id, private=private, posts_to=posts_to.value)
        is_new = with_database(lambda database: users.add(database, user, order=asked))
    except ValueError as error:
        fail(str(error))
    if not is_new:
        fail(f"there is a user {user_id} already, who stays as they are", status=NOT_FOUND)
    if as_json:
        print_json(user)
    else:
        print_lines([f"added: {_told(user)}"])


@app.command("list")
def list_users(
    limit: Limit = 100,
    after: Annotated[str | None, typer.Option("--after", metavar="ID", help="Go on after this user.")] = None,
    as_json: AsJson = False,
) -> None:
    """List users by id, a host application's too."""
    from federation.admin import users

    page = with_database(lambda database: users.list_users(database, limit=limit, after=after))
    if as_json:
        print_json(page)
        return
    print_table(
        ("ID", "PRIVATE", "POSTS TO"), ((each.id, each.is_private, each.post_propagation_policy) for each in page.users)
    )
    if page.after:
        print_lines([f"more: --after {page.after}"])


def _told(user: LocalUser) -> str:
    return f"{user.id}, {'private' if user.is_private else 'public'}, posts to {user.post_propagation_policy}"
