"""What the jobs of the queues are called and hold, as it lies in the queue, where other implementations read it."""

from __future__ import annotations

from typing import Annotated, Final, Self

from pydantic import AliasGenerator, BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel

from federation.protocol.models import MAX_PAYLOAD_BYTES

FOLLOW_JOB: Final = "deliver-follow"
UNFOLLOW_JOB: Final = "deliver-unfollow"
POST_JOB: Final = "deliver-post"
HEALTH_CHECK_JOB: Final = "health-check"
DISCOVERY_JOB: Final = "discover"

_VISIBLE: Final = r"^[!-~]*$"


class _JobData(BaseModel):
    """Job data is camelCase in the queue, where other implementations read it, and either spelling in Python."""

    model_config = ConfigDict(
        strict=True,
        frozen=True,
        extra="ignore",
        populate_by_name=True,
        alias_generator=AliasGenerator(alias=to_camel),
        hide_input_in_errors=True,
    )

    def to_wire(self) -> dict[str, object]:
        """The data as it lies in the queue."""
        return self.model_dump(by_alias=True)


class FederationDeliveryJob(_JobData):
    """One delivery: the row it belongs to, where it goes, and its payload, a JSON text, or what refers to it.

    Jobs of Node producers carry the text. Ours carry `payload_id`: the row's own id where the row has the text, else
    that of a `delivery_payloads` row. `suspect`: it may be what crashed workers, and runs apart from others. `node` and
    `database` say whose row it is: the node's own URL, and the id of its database.
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
        """The data as it lies in the queue; of what Node does not know only what is needed."""
        absent = {name for name in ("payload_id", "suspect", "node", "database") if not getattr(self, name)}
        return self.model_dump(by_alias=True, exclude=absent)


class HealthCheckJob(_JobData):
    """One probe of one server."""

    server_url: Annotated[str, Field(max_length=2048, pattern=r"^[^\x00]*$")]


class DiscoveryJob(_JobData):
    """One unknown server."""

    server_url: Annotated[str, Field(max_length=2048, pattern=r"^[^\x00]*$")]
