"""The application's tables and the sessions that reach them; `db.migrate.upgrade` creates and updates the schema."""

from db.analytics import RelayCandidate, ServerScorecard
from db.columns import FederationTable, HostTable, new_id
from db.deliveries import AttemptOutcome, DeliveryAttempt, DeliveryJob
from db.follows import Follow
from db.host import Block, Post, User, create_host_tables
from db.servers import BlacklistedServer, RotateChallengeToken, Server, ServerHealth, ServerHealthEvent
from db.session import Database
from db.url import DatabaseUrlError

__all__ = [
    "AttemptOutcome",
    "BlacklistedServer",
    "Block",
    "Database",
    "DatabaseUrlError",
    "DeliveryAttempt",
    "DeliveryJob",
    "FederationTable",
    "Follow",
    "HostTable",
    "Post",
    "RelayCandidate",
    "RotateChallengeToken",
    "Server",
    "ServerHealth",
    "ServerHealthEvent",
    "ServerScorecard",
    "User",
    "create_host_tables",
    "new_id",
]
