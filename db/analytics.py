"""What the nightly analytics found out about servers, for the choice of relays and for operators; and what they read
that nothing else keeps.

Each publication replaces scorecards and candidates as a whole. `generation` counts the publications, which tells rows
of an earlier one from those of the latest. The analytics define the values of `trend` and `action`; an unknown one is
no error.
"""

from datetime import date, datetime

from sqlalchemy import JSON, BigInteger, Date, Double, Index, Text
from sqlmodel import Field

from db.columns import FederationTable, UtcDateTime


class ServerScorecard(FederationTable, table=True):
    """How a server did in the `window_days` days up to and including `as_of`. Null: nothing to judge by.

    Ratios are 0 to 1, the score 0 to 100, `_s` seconds, `_ms` milliseconds.
    """

    __tablename__ = "server_scorecards"

    # Written by analytics/data/publish, all of it each time.
    server_url: str = Field(sa_type=Text, primary_key=True)
    window_days: int = Field(primary_key=True)
    as_of: date = Field(sa_type=Date)
    generation: int = Field(sa_type=BigInteger)
    attempts: int = Field(sa_type=BigInteger)
    delivered: int = Field(sa_type=BigInteger)
    availability: float | None = Field(default=None, sa_type=Double)
    score: float | None = Field(default=None, sa_type=Double)
    p95_ms: int | None = None
    failures: int | None = None
    mttf_s: float | None = Field(default=None, sa_type=Double)
    mttr_s: float | None = Field(default=None, sa_type=Double)
    longest_outage_s: float | None = Field(default=None, sa_type=Double)
    trend: str | None = Field(default=None, sa_type=Text)
    trend_change: float | None = Field(default=None, sa_type=Double)
    state: str | None = Field(default=None, sa_type=Text)
    state_since: datetime | None = Field(default=None, sa_type=UtcDateTime)
    top_error: str | None = Field(default=None, sa_type=Text)
    action: str = Field(sa_type=Text)
    reasons: list[str] = Field(sa_type=JSON)
    owed: int | None = Field(default=None, sa_type=BigInteger)
    held: int | None = Field(default=None, sa_type=BigInteger)
    owed_since: datetime | None = Field(default=None, sa_type=UtcDateTime)
    lost: int | None = Field(default=None, sa_type=BigInteger)


class RelayCandidate(FederationTable, table=True):
    """A peer a delivery could go through; `rank` 1 is the best. While a ranking is published, ranks may repeat."""

    __tablename__ = "relay_candidates"
    __table_args__ = (Index("relay_candidates_rank_idx", "rank"),)

    # Written by analytics/data/publish, all of it each time.
    server_url: str = Field(sa_type=Text, primary_key=True)
    rank: int
    as_of: date = Field(sa_type=Date)
    generation: int = Field(sa_type=BigInteger)
    score: float = Field(sa_type=Double)
    availability: float | None = Field(default=None, sa_type=Double)
    p95_ms: int | None = None
    last_seen: datetime | None = Field(default=None, sa_type=UtcDateTime)


class AcceptedKey(FederationTable, table=True):
    """A key that an operator has looked at: the analytics report it no longer as shared or changed.

    `fingerprint` is the SHA-256 of the raw key, in hex.
    """

    __tablename__ = "accepted_keys"

    # Written by admin/servers/servers, at once.
    server_url: str = Field(sa_type=Text, primary_key=True)
    fingerprint: str = Field(sa_type=Text, primary_key=True)
    accepted_at: datetime = Field(sa_type=UtcDateTime)
