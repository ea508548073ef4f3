"""Remote servers: the registry, the blacklist, pending key rotations and the history of their health."""

from datetime import datetime
from enum import StrEnum
from typing import Final

from sqlalchemy import BigInteger, Index, Integer, Text, UniqueConstraint, text
from sqlmodel import Field

from db.columns import DEFAULT_WIRE, FederationTable, TextEnum, UtcDateTime, new_id


class ServerHealth(StrEnum):
    """What we believe of a server: does it answer?"""

    HEALTHY = "healthy"
    UNHEALTHY = "unhealthy"


class Server(FederationTable, table=True):
    """A remote server we know, by its canonical URL, with both public keys (base64) and its health.

    `knows_key` is the public signing key by which it knows us; without it, the older of ours. At `rotation_tried_at` it
    was last asked to take the newer, in vain if there is a `rotation_problem`: a code.
    At `proved_at` it last showed that it holds its keys; at `claimed_at` the server `claimed_by` last claimed one of
    them, in vain, though it holds that key, too, if `claim_proved`.
    Each key is unique twice, by constraint and by index, because existing databases have both.
    """

    __tablename__ = "server_registry"
    __table_args__ = (
        UniqueConstraint("url", name="server_registry_url_unique"),
        UniqueConstraint("public_key", name="server_registry_public_key_unique"),
        UniqueConstraint("encryption_public_key", name="server_registry_encryption_public_key_unique"),
        Index("serverRegistry_publicKey_uidx", "public_key", unique=True),
        Index("serverRegistry_encryptionPublicKey_uidx", "encryption_public_key", unique=True),
        Index("serverRegistry_lastSeen_idx", "last_seen"),
    )

    # Written by sealed/peers/registry, once.
    id: str = Field(default_factory=new_id, sa_type=Text, primary_key=True)
    url: str = Field(sa_type=Text)
    # Written by sealed/peers/registry, node/rotation (its new keys).
    public_key: str = Field(sa_type=Text)
    encryption_public_key: str = Field(sa_type=Text)
    # Written by sealed/peers/registry, node/rotation (its new keys).
    last_seen: datetime = Field(sa_type=UtcDateTime)
    # Written by sealed/peers/registry, once.
    created_at: datetime = Field(sa_type=UtcDateTime)
    # Written by sealed/peers/registry, node/rotation (its new keys).
    updated_at: datetime = Field(sa_type=UtcDateTime)
    # Written by sealed/peers/registry.
    is_healthy: bool
    health_check_attempts: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    unhealthy_reason: str | None = Field(default=None, sa_type=Text)
    # Written by sealed/peers/registry, sealed/peers/key_rotation (our new keys).
    knows_key: str | None = Field(default=None, sa_type=Text)
    rotation_tried_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    rotation_problem: str | None = Field(default=None, sa_type=Text)
    # Written by sealed/peers/claims.
    proved_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    claimed_by: str | None = Field(default=None, sa_type=Text)
    claimed_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    claim_proved: bool | None = None


class LinkState(StrEnum):
    """What becomes of deliveries to a server."""

    UP = "up"
    """They are sent."""
    DOWN = "down"
    """They are held: it was not there over some time."""
    REFUSING = "refusing"
    """They are held: it answered, and took none of the last thousand."""
    MISMATCH = "mismatch"
    """They are held: it shows another signing key than the registered one."""


class ServerLink(FederationTable, table=True):
    """How deliveries to a server go by one wire, by evidence. Without a row it is up, and nothing is known of it.

    An operator's hold is the server's, and so on each of its rows; all else is found out for each wire by itself.
    `evidence` counts the intervals with failures since the last success, the latest at `evidence_at`; `rejections` the
    refusals since. While the link is not up it is looked at at `next_probe_at`, which was planned at `probed_at`, after
    `probes` looks in vain; `canaries` counts the deliveries that were refused for themselves within one look. `fell_at`
    is when the present outage began, as long as nothing was acknowledged since, even if the link is up in between.
    `moved_to` is the origin that the server's last redirect named. At `looked_at` a look at its keys began, which has
    died with its process if `look_ended_at` is older. `rest_until` is when the pause ends that the server
    asked for; at `release_at` the next held deliveries go out, `release_rate` a second. `profile` names the
    implementation it is known to run. `signature` is the kind of signature by which it took a delivery that it had
    refused by the other; `first_answer_was_page` tells whether the first answer with which it took one was a page,
    or was lost.
    """

    __tablename__ = "server_links"
    __table_args__ = (
        Index(
            "server_links_probe_idx",
            "next_probe_at",
            postgresql_where=text("next_probe_at IS NOT NULL"),
            sqlite_where=text("next_probe_at IS NOT NULL"),
        ),
        Index(
            "server_links_probed_idx",
            "probed_at",
            postgresql_where=text("next_probe_at IS NOT NULL"),
            sqlite_where=text("next_probe_at IS NOT NULL"),
        ),
        Index(
            "server_links_release_idx",
            "release_at",
            postgresql_where=text("release_at IS NOT NULL"),
            sqlite_where=text("release_at IS NOT NULL"),
        ),
    )

    # Written by servers/links, for deliveries, probes, releases and operators.
    server_url: str = Field(sa_type=Text, primary_key=True)
    wire: str = Field(
        default=DEFAULT_WIRE, sa_type=Text, primary_key=True, sa_column_kwargs={"server_default": DEFAULT_WIRE}
    )
    state: LinkState = Field(default=LinkState.UP, sa_type=TextEnum(LinkState))
    since: datetime = Field(sa_type=UtcDateTime)
    reason: str | None = Field(default=None, sa_type=Text)
    operator_hold: bool = False
    relayed: bool = False
    acknowledged: bool = False
    evidence: int = 0
    evidence_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    last_success_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    rejections: int = 0
    probes: int = 0
    next_probe_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    rests: int = 0
    rest_until: datetime | None = Field(default=None, sa_type=UtcDateTime)
    release_start: float = 1.0
    release_rate: float = 1.0
    release_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    looked_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    profile: str | None = Field(default=None, sa_type=Text)
    fell_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    canaries: int = Field(default=0, sa_column_kwargs={"server_default": text("0")})
    probed_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    moved_to: str | None = Field(default=None, sa_type=Text)
    look_ended_at: datetime | None = Field(default=None, sa_type=UtcDateTime)
    signature: str | None = Field(default=None, sa_type=Text)
    first_answer_was_page: bool | None = None


# Which rules may have another canonical spelling than their own: some that have none are among them, and none that has
# one is not. `*.` and a plain domain, and an origin without a port, are spelt canonically; an address may be or not.
SPELT_OTHERWISE_ON_SQLITE: Final = (
    "server_url GLOB '*[^a-z0-9.:/*_-]*' OR server_url GLOB '*[/.]' OR server_url GLOB '*:*:*'"
    " OR ((server_url GLOB '*//[0-9]*' OR server_url GLOB '*.[0-9]*') AND server_url NOT GLOB '*.[a-z_-]*')"
)
SPELT_OTHERWISE_ON_POSTGRES: Final = (
    """server_url COLLATE "C" ~ '[^a-z0-9.:/*_-]' OR server_url ~ '[/.]$' OR server_url ~ ':.*:'"""
    """ OR (server_url COLLATE "C" ~ '(//|[.])[0-9]' AND server_url COLLATE "C" !~ '[.][a-z_-]')"""
)


class BlacklistedServer(FederationTable, table=True):
    """A rule: the server, or the domain written `*.example`, that we refuse to deliver to and to hear from.

    In force until `expires_at`, or for good where that is null, as in rows of the original. The URL is not unique:
    existing databases may hold a server twice, and every decision keeps its reason.
    """

    __tablename__ = "blacklisted_servers"
    __table_args__ = (
        Index("blacklistedServers_serverUrl_idx", "server_url"),
        Index(
            "blacklisted_servers_spelling_idx",
            "id",
            postgresql_where=text(SPELT_OTHERWISE_ON_POSTGRES),
            sqlite_where=text(SPELT_OTHERWISE_ON_SQLITE),
        ),
    )

    # Written by admin/blacklist/rows, once.
    id: str = Field(default_factory=new_id, sa_type=Text, primary_key=True)
    server_url: str = Field(sa_type=Text)
    created_at: datetime = Field(sa_type=UtcDateTime)
    reason: str = Field(sa_type=Text)
    expires_at: datetime | None = Field(default=None, sa_type=UtcDateTime)


class BlacklistRevision(FederationTable, table=True):
    """One row, whose `revision` triggers raise with every change of `blacklisted_servers`, no matter who makes it."""

    __tablename__ = "blacklist_revision"

    # Written by triggers on `blacklisted_servers`.
    id: int = Field(primary_key=True, sa_column_kwargs={"autoincrement": False})
    revision: int = Field(sa_type=BigInteger)


class RotateChallengeToken(FederationTable, table=True):
    """A key rotation a remote server has begun and not yet proven: four plaintext challenges and its new keys."""

    __tablename__ = "rotate_challenge_tokens"
    __table_args__ = (Index("rotateChallengeTokens_serverUrl_idx", "server_url"),)

    # Written by node/rotation.
    id: str = Field(default_factory=new_id, sa_type=Text, primary_key=True)
    signing_old_token: str = Field(sa_type=Text, repr=False)
    signing_new_token: str = Field(sa_type=Text, repr=False)
    encryption_old_token: str = Field(sa_type=Text, repr=False)
    encryption_new_token: str = Field(sa_type=Text, repr=False)
    new_signing_public_key: str = Field(sa_type=Text)
    new_encryption_public_key: str = Field(sa_type=Text)
    server_url: str = Field(sa_type=Text)
    created_at: datetime = Field(sa_type=UtcDateTime)
    attempts_left: int = Field(default=3, sa_column_kwargs={"server_default": text("3")})
    expires_at: datetime = Field(sa_type=UtcDateTime)


class ServerHealthEvent(FederationTable, table=True):
    """One change of a server's health; append-only. `reason` is the failure code, or why it healed."""

    __tablename__ = "server_health_events"
    __table_args__ = (
        Index("server_health_events_server_url_at_idx", "server_url", "at"),
        Index("server_health_events_at_idx", "at"),
    )

    # Written by sealed/peers/registry, once.
    id: int | None = Field(default=None, sa_type=BigInteger().with_variant(Integer, "sqlite"), primary_key=True)
    server_url: str = Field(sa_type=Text)
    from_state: ServerHealth = Field(sa_type=TextEnum(ServerHealth))
    to_state: ServerHealth = Field(sa_type=TextEnum(ServerHealth))
    reason: str | None = Field(default=None, sa_type=Text)
    at: datetime = Field(sa_type=UtcDateTime)
