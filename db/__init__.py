"""The application's tables and the sessions that reach them; `db.migrate.upgrade` creates and updates the schema."""

from db.activitypub import (
    ActivityActor,
    ActivityFollow,
    ActivityInbox,
    ActivityKey,
    FollowDirection,
    FollowState,
    ReceivedActivity,
    ReceivedState,
    RemoteActorKey,
    UndoneFollow,
)
from db.analytics import AcceptedKey, RelayCandidate, ServerScorecard
from db.columns import DEFAULT_WIRE, FederationTable, HostTable, among, new_id, new_timed_id
from db.deliveries import (
    AttemptNote,
    AttemptOutcome,
    DeliveryAttempt,
    DeliveryJob,
    DeliveryLoss,
    DeliveryPayload,
    DeliveryState,
    HoldReason,
)
from db.follows import Follow, FollowNews
from db.host import Block, HostTablesError, Post, User, create_host_tables
from db.operators import ActionSource, AdminAction, BulkJob, BulkVerb
from db.rollups import AttemptMinute, DeliveryTotal, RollupPosition, ServerSummary
from db.scheduling import ProcessClock, RunOutcome, SchedulerJob, Sweep
from db.servers import (
    BlacklistedServer,
    BlacklistRevision,
    LinkState,
    RotateChallengeToken,
    Server,
    ServerHealth,
    ServerHealthEvent,
    ServerLink,
)
from db.session import Database, ForeignDatabase, OwnDatabase, one_at_a_time
from db.sightings import DatabaseIdentity, QueueSighting, SightingKind
from db.url import DatabaseUrlError

__all__ = [
    "DEFAULT_WIRE",
    "AcceptedKey",
    "ActionSource",
    "ActivityActor",
    "ActivityFollow",
    "ActivityInbox",
    "ActivityKey",
    "AdminAction",
    "AttemptMinute",
    "AttemptNote",
    "AttemptOutcome",
    "BlacklistRevision",
    "BlacklistedServer",
    "Block",
    "BulkJob",
    "BulkVerb",
    "Database",
    "DatabaseIdentity",
    "DatabaseUrlError",
    "DeliveryAttempt",
    "DeliveryJob",
    "DeliveryLoss",
    "DeliveryPayload",
    "DeliveryState",
    "DeliveryTotal",
    "FederationTable",
    "Follow",
    "FollowDirection",
    "FollowNews",
    "FollowState",
    "ForeignDatabase",
    "HoldReason",
    "HostTable",
    "HostTablesError",
    "LinkState",
    "OwnDatabase",
    "Post",
    "ProcessClock",
    "QueueSighting",
    "ReceivedActivity",
    "ReceivedState",
    "RelayCandidate",
    "RemoteActorKey",
    "RollupPosition",
    "RotateChallengeToken",
    "RunOutcome",
    "SchedulerJob",
    "Server",
    "ServerHealth",
    "ServerHealthEvent",
    "ServerLink",
    "ServerScorecard",
    "ServerSummary",
    "SightingKind",
    "Sweep",
    "UndoneFollow",
    "User",
    "among",
    "create_host_tables",
    "new_id",
    "new_timed_id",
    "one_at_a_time",
]
