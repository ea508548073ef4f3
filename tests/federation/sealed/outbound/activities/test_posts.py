"""What a post stores, to whom it is owed, and what stops it."""

from __future__ import annotations

import json
from typing import cast

import pytest
from pydantic import JsonValue
from sqlalchemy import select
from sqlmodel import col

from db import DeliveryJob, DeliveryPayload, Follow, Post, User
from federation.base.errors import ConfigurationError
from federation.runtime.composition import Federation
from tests.federation.conftest import OWN_URL, MakeSettings
from tests.federation.sealed.outbound.activities.stored import NOW, all_of, everywhere, jobs, only_row

TEXT = [{"type": "text", "value": "hello"}]
SERVERS = [f"https://{name}.example" for name in "bcdefg"]


async def audience(node: Federation, policy: str | None) -> list[str]:
    """The servers owed a post of alice's, who has every kind of follow there is, under this policy."""
    async with node.database.transaction() as session:
        for number, url in enumerate(SERVERS):
            await node.registry.register(
                url=url, public_key=f"k{number}", encryption_public_key=f"e{number}", session=session
            )
        session.add(User(id="alice", post_propagation_policy=policy))
        b, c, d, e, f, g = SERVERS
        for follower, following, follower_server, following_server, accepted in [
            ("bob", "alice", b, None, True),  # filed by a relay
            ("carol", "alice", None, c, True),  # filed by a direct request
            ("bert", "alice", None, b, True),  # a second follower on the same server
            ("alice", "dave", d, None, True),  # alice's own follow
            ("erin", "alice", None, e, False),  # not accepted
            ("alice", "frank", f, None, False),
            ("local", "alice", None, None, True),
            ("bob", "somebody else", g, None, True),
            ("aaron", "somebody else", g, None, True),
        ]:
            session.add(
                Follow(
                    follower_id=follower,
                    following_id=following,
                    follower_server_url=follower_server,
                    following_server_url=following_server,
                    accepted=accepted,
                    created_at=NOW,
                )
            )
    async with node.outbox.transaction() as session:
        published = await node.producers.publish_post(session, author_id="alice", content=TEXT, published=NOW)
    rows = [row for row in await all_of(node, DeliveryJob) if isinstance(row, DeliveryJob)]
    assert {row.id for row in rows} == set(published.delivery_ids) == (await jobs(node)).keys()
    assert all(row.target_url == f"{row.server_url}/api/auth/social/posts" for row in rows)
    assert len({row.payload_id for row in rows}) <= 1
    return sorted(row.server_url or "" for row in rows)


@everywhere
@pytest.mark.parametrize(
    ("policy", "servers"),
    [("all", SERVERS[:3]), (None, SERVERS[:3]), ("followers", SERVERS[:2]), ("none", [])],
)
async def test_a_post_is_owed_to_the_servers_its_authors_policy_names(
    node: Federation, policy: str | None, servers: list[str]
) -> None:
    """Once per server, whichever column of an accepted follow names it; with `followers` only where she is followed."""
    assert await audience(node, policy) == servers


async def test_a_post_goes_out_when_only_followers_or_only_follows_exist(node: Federation) -> None:
    """One empty side hides nothing of the other."""
    url = SERVERS[0]
    await node.registry.register(url=url, public_key="k", encryption_public_key="e")
    async with node.database.transaction() as session:
        session.add_all([User(id="followed"), User(id="following")])
        for follower, following in [("x", "followed"), ("following", "y")]:
            session.add(
                Follow(
                    follower_id=follower,
                    following_id=following,
                    follower_server_url=url,
                    accepted=True,
                    created_at=NOW,
                )
            )
    for author in ("followed", "following"):
        async with node.outbox.transaction() as session:
            published = await node.producers.publish_post(session, author_id=author, content=TEXT)
        assert len(published.delivery_ids) == 1


@everywhere
async def test_a_follow_row_with_an_unusable_server_does_not_keep_a_post_from_the_others(node: Federation) -> None:
    """An adopted registry may hold what cannot be delivered to, and one server in two spellings."""
    odd = ["https://user:pw@evil.example", "https://b.example", "https://B.example/", OWN_URL]
    async with node.database.transaction() as session:
        session.add(User(id="alice"))
        for number, url in enumerate(odd):
            await node.registry.register(
                url=url, public_key=f"k{number}", encryption_public_key=f"e{number}", session=session
            )
            session.add(
                Follow(
                    follower_id=f"f{number}",
                    following_id="alice",
                    follower_server_url=url,
                    accepted=True,
                    created_at=NOW,
                )
            )
    async with node.outbox.transaction() as session:
        await node.producers.publish_post(session, author_id="alice", content=TEXT)
    assert (await only_row(node)).server_url == "https://b.example"


@everywhere
@pytest.mark.parametrize(("given", "sent"), [(None, False), (False, False), (True, True)])
async def test_a_post_carries_what_receivers_require(node: Federation, given: bool | None, sent: bool) -> None:
    """An unset `isPrivate` goes out as false; what is stored is what was published."""
    await node.registry.register(url="https://b.example", public_key="k", encryption_public_key="e")
    async with node.database.transaction() as session:
        session.add(User(id="alice"))
        session.add(
            Follow(
                follower_id="bob",
                following_id="alice",
                follower_server_url="https://b.example",
                accepted=True,
                created_at=NOW,
            )
        )
    async with node.outbox.transaction() as session:
        published = await node.producers.publish_post(
            session, author_id="alice", content=TEXT, published=NOW, is_private=given, post_id="p1"
        )
    assert published.post_id == "p1"
    async with node.database.read() as session:
        post = (await session.execute(select(Post).where(col(Post.id) == "p1"))).scalar_one()
    assert (post.content, post.author_id, post.published, post.is_local, post.is_private) == (
        TEXT,
        "alice",
        NOW,
        True,
        sent,
    )
    assert (await only_row(node)).payload == ""
    async with node.database.read() as session:
        text = (await session.execute(select(DeliveryPayload))).scalar_one()
    assert (text.id, text.refs) == ((await only_row(node)).payload_id, 1)
    assert json.loads(text.payload) == {
        "method": "FEDERATE_POST",
        "federationUrl": OWN_URL,
        "post": {
            "id": "p1",
            "content": TEXT,
            "authorId": "alice",
            "published": "2026-01-02T03:04:05.678Z",
            "isPrivate": sent,
        },
    }


@pytest.mark.parametrize("content", [[], [{"type": "text"}], [{"type": "poem", "value": "x"}], [{"value": "x"}]])
async def test_a_post_receivers_would_refuse_is_refused_here(
    node: Federation, content: list[dict[str, JsonValue]]
) -> None:
    """The author hears of it at once, not five attempts later, and nothing is stored."""
    with pytest.raises(ValueError, match=r"content|payload|value|type"):
        async with node.outbox.transaction() as session:
            await node.producers.publish_post(session, author_id="alice", content=content)
    assert await all_of(node, Post) == []


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("hello", "must be a list of blocks, each a dict"),
        ({"type": "text", "value": "x"}, "must be a list of blocks, each a dict"),
        ([], "must have at least one block"),
        ([{"type": "poem"}], "unknown type, not one of 'text', 'image', 'video', 'audio', 'link'"),
    ],
)
async def test_content_that_is_none_is_told_what_it_has_to_be(node: Federation, content: object, told: str) -> None:
    """In words of the caller's, not of what validates it."""
    given = cast("list[dict[str, JsonValue]]", content)  # a caller without types gives anything
    with pytest.raises(ValueError, match=told):
        async with node.outbox.transaction() as session:
            await node.producers.publish_post(session, author_id="alice", content=given)


async def test_a_node_without_a_url_has_no_producers(make_settings: MakeSettings) -> None:
    """The error names the variable."""
    nameless = Federation(make_settings(better_auth_url=None))
    try:
        with pytest.raises(ConfigurationError, match="BETTER_AUTH_URL"):
            _ = nameless.producers
    finally:
        await nameless.close()
