"""The names and the data of jobs, as they lie in the queue, where other implementations read them."""

from __future__ import annotations

from typing import Annotated, Final, Self

from pydantic import AliasGenerator, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from federation.protocol.encodings import MAX_PAYLOAD_BYTES

FOLLOW_JOB: Final = "deliver-follow"
UNFOLLOW_JOB: Final = "deliver-unfollow"
POST_JOB: Final = "deliver-post"
HEALTH_CHECK_JOB: Final = "health-check"
DISCOVERY_JOB: Final = "discover"
ACTIVITY_JOB: Final = "deliver-activity"
"""Of the wire that is ActivityPub, whose jobs lie in a queue of their own."""

_VISIBLE: Final = r"^[!-~]*$"


class _JobData(BaseModel):
    """Job data: camelCase in the queue, where other implementations read it, either spelling in Python."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="ignore",
        populate_by_name=True,
        alias_generator=AliasGenerator(alias=to_camel),
        hide_input_in_errors=True,
    )

    def to_wire(self) -> dict[str, object]:
        """Return the data as it lies in the queue."""
        return self.model_dump(by_alias=True)


class FederationDeliveryJob(_JobData):
    """One delivery: the row it belongs to, where it goes, and its payload, a JSON text, or a reference to it.

    Jobs of Node producers carry the text. Ours carry `payload_id`: the row's own id if the row has the text, otherwise
    the id of a `delivery_payloads` row. `suspect` says that it may have crashed workers, and runs apart from others.
    `node` and `database` say whose row it is: by the node's own URL, and by the id of its database.
    """

    delivery_job_id: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00]*$")]
    target_url: Annotated[str, Field(max_length=2048)]
    server_url: Annotated[str, Field(max_length=2048, pattern=r"^[^\x00]*$")]
    payload: Annotated[str, Field(repr=False, max_length=MAX_PAYLOAD_BYTES)]
    payload_id: Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[^\x00]*$")] | None = None
    suspect: bool = False
    node: Annotated[str, Field(max_length=2048, pattern=_VISIBLE)] | None = None
    database: Annotated[str, Field(max_length=512, pattern=_VISIBLE)] | None = None

    @model_validator(mode="after")
    def _has_one_text(self) -> Self:
        if self.payload and self.payload_id:
            raise ValueError("payload must be empty beside payloadId")
        return self

    def to_wire(self) -> dict[str, object]:
        """Return the data as it lies in the queue.

        Fields that Node does not know are left out unless they are needed.
        """
        absent = {name for name in ("payload_id", "suspect", "node", "database") if not getattr(self, name)}
        return self.model_dump(by_alias=True, exclude=absent)


class HealthCheckJob(_JobData):
    """A probe of one server."""

    server_url: Annotated[str, Field(max_length=2048, pattern=r"^[^\x00]*$")]


class DiscoveryJob(_JobData):
    """A discovery of one unknown server."""

    server_url: Annotated[str, Field(max_length=2048, pattern=r"^[^\x00]*$")]
