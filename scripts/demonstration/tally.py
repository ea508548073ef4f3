"""What has been delivered, counted where it can be seen: in the sender's log of attempts, and the peers' own tables."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field

from nodes import Node


@dataclass(slots=True)
class Owed:
    """What the application asked for: the posts for each peer, and the follows (by peer and followed user)."""

    posts: dict[str, set[str]] = field(default_factory=dict)  # by the peer's URL
    follows: set[tuple[str, str]] = field(default_factory=set)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The numbers of either story, at one moment.

    A lost delivery is neither at its peer nor known to the sender any more, unlike one that is not yet delivered.
    Between two of the queries an arrival may look like that, so `lost` and `duplicates` mean something only at the end.
    """

    delivered: int
    failed: int
    lost: int
    duplicates: int
    retried: int
    replayed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally(Counts):
    """Those of a story between nodes of ours."""

    probes: int
    healed: int
    follows_accepted: int
    follows_acknowledged: int


def count(sender: Node, peers: Sequence[Node], owed: Owed) -> Tally:
    """Return the numbers as they are now."""
    lost = duplicates = 0
    for peer in peers:
        stored = list(_column(peer, "SELECT federation_post_id FROM posts WHERE federation_url = ?", sender.url))
        duplicates += len(stored) - len(set(stored))
        lost += len(owed.posts.get(peer.url, set()) - set(stored) - _posts_with_rows(sender, peer))
        follows = list(_column(peer, "SELECT following_id FROM follows WHERE following_server_url = ?", sender.url))
        duplicates += len(follows) - len(set(follows))
        users = {user for url, user in owed.follows if url == peer.url}
        lost += max(len(users - set(follows)) - _follows_with_rows(sender, peer), 0)
    return Tally(
        delivered=_delivered(sender),
        failed=_failed(sender),
        lost=lost,
        duplicates=duplicates,
        retried=_retried(sender),
        replayed=sum(peer.count("post_replayed") + peer.count("follow_replayed") for peer in peers),
        probes=sender.count("health_probe"),
        healed=_number(sender, "SELECT count(*) FROM server_health_events WHERE to_state = 'healthy'"),
        follows_accepted=_number(sender, "SELECT count(*) FROM follows WHERE accepted AND follower_id = 'alice'"),
        follows_acknowledged=_number(
            sender, "SELECT count(*) FROM follows WHERE acknowledged AND NOT accepted AND follower_id = 'alice'"
        ),
    )


def count_notes(sender: Node, peers: Sequence[Node], owed: Mapping[str, str]) -> Counts:
    """Return the numbers as they are now. `owed` are the texts of notes, each for all peers, by their activities."""
    lost = duplicates = 0
    for peer in peers:
        stored = shown_by(peer)
        duplicates += len(stored) - len(set(stored))
        waiting = {owed[activity] for activity in _activities_with_rows(sender, peer) if activity in owed}
        lost += len(set(owed.values()) - set(stored) - waiting)
    return Counts(
        delivered=_delivered(sender),
        failed=_failed(sender),
        lost=lost,
        duplicates=duplicates,
        retried=_retried(sender),
        replayed=sum(peer.count("activity_replayed") for peer in peers),
    )


def shown_by(peer: Node) -> list[str]:
    """Return the texts of the notes that a server of the fediverse shows, which it does by a line for each."""
    lines = peer.log_path.read_text().splitlines()
    return [text for _, says, text in (line.partition(" says: ") for line in lines) if says]


def delivered_to(sender: Node, peer: Node) -> int:
    """Count the deliveries that the peer has acknowledged."""
    return _number(
        sender,
        "SELECT count(DISTINCT delivery_id) FROM delivery_attempts WHERE outcome = 'delivered' AND server_url = ?",
        peer.url,
    )


def health_of(sender: Node, peer: Node) -> str:
    """Return how the sender sees the peer."""
    rows = _rows(sender, "SELECT is_healthy, unhealthy_reason FROM server_registry WHERE url = ?", peer.url)
    # Servers of ActivityPub are in no registry.
    rows = rows or _rows(sender, "SELECT state = 'up', reason FROM server_links WHERE server_url = ?", peer.url)
    if not rows:
        return "unknown"
    healthy, reason = rows[0]
    return "healthy" if healthy else str(reason)


def waiting_for(sender: Node, peer: Node) -> int:
    """Count the deliveries to the peer that are still owed."""
    return _number(sender, "SELECT count(*) FROM delivery_jobs WHERE settled_at IS NULL AND server_url = ?", peer.url)


def _posts_with_rows(sender: Node, peer: Node) -> set[str]:
    """Return the posts for the peer that the sender still knows: to be sent, held until it is back, or given up."""
    query = (
        "SELECT json_extract(coalesce(texts.payload, jobs.payload), '$.post.id') FROM delivery_jobs AS jobs "
        "LEFT JOIN delivery_payloads AS texts ON texts.id = jobs.payload_id "
        "WHERE jobs.job_name = 'deliver-post' AND jobs.server_url = ?"
    )
    return set(_column(sender, query, peer.url))


def _activities_with_rows(sender: Node, peer: Node) -> Iterable[str]:
    query = (
        "SELECT texts.activity_id FROM delivery_jobs AS jobs "
        "JOIN delivery_payloads AS texts ON texts.id = jobs.payload_id WHERE jobs.server_url = ?"
    )
    return _column(sender, query, peer.url)


def _delivered(sender: Node) -> int:
    return _number(sender, "SELECT count(DISTINCT delivery_id) FROM delivery_attempts WHERE outcome = 'delivered'")


def _failed(sender: Node) -> int:
    return _number(sender, "SELECT count(*) FROM delivery_jobs WHERE settled_at IS NOT NULL")


def _retried(sender: Node) -> int:
    return _number(sender, "SELECT count(DISTINCT delivery_id) FROM delivery_attempts WHERE attempt > 1")


def _follows_with_rows(sender: Node, peer: Node) -> int:
    query = "SELECT count(*) FROM delivery_jobs WHERE job_name = 'deliver-follow' AND server_url = ?"
    return _number(sender, query, peer.url)


def _number(node: Node, query: str, *parameters: str) -> int:
    return int(next(iter(_column(node, query, *parameters))))


def _column(node: Node, query: str, *parameters: str) -> Iterable[str]:
    return [row[0] for row in _rows(node, query, *parameters)]


def _rows(node: Node, query: str, *parameters: str) -> list[tuple[str, ...]]:
    path = node.directory / "node.sqlite3"
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=10)) as connection:
        return connection.execute(query, parameters).fetchall()
