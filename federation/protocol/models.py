"""What every JSON model of the wire shares: no coercion, unknown members dropped, errors and reprs without content."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from federation.protocol.encodings import parse_json, parse_moment
from federation.protocol.errors import NotJson, PayloadError

MAX_PAYLOAD_BYTES = 2 * 1024 * 1024
"""The largest plaintext we seal, or parse after opening; a relay carries about 143 KiB."""

_ERRORS_SHOWN = 3


class WireModel(BaseModel):
    """A JSON object from another server, in camelCase there and in snake_case here."""

    model_config = ConfigDict(
        strict=True, frozen=True, extra="ignore", alias_generator=to_camel, hide_input_in_errors=True
    )

    def __repr_args__(self) -> Iterable[tuple[str | None, object]]:
        """Show no member, so that payloads end up neither in logs nor in tracebacks."""
        return ()


def _storable(text: str) -> str:
    # PostgreSQL can store neither, as text or as jsonb: one such value would make a whole transaction fail.
    if "\x00" in text:
        raise ValueError("must not contain the NUL character")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("must not contain lone surrogates") from None
    return text


Text = Annotated[str, AfterValidator(_storable)]
# Both are short enough for an index entry of PostgreSQL; peers use UUIDs and origins.
Identifier = Annotated[Text, Field(max_length=512)]
ServerUrl = Annotated[Text, Field(max_length=2048)]
Moment = Annotated[datetime, BeforeValidator(parse_moment)]

ModelT = TypeVar("ModelT", bound=WireModel)


def parse_model(model: type[ModelT], text: str) -> ModelT:
    """Return the *model* in a JSON plaintext.

    Raises:
        PayloadError: longer than `MAX_PAYLOAD_BYTES`, not JSON, or not of that shape; names up to three members.
    """
    try:
        return validate(model, parse_json(text, limit=MAX_PAYLOAD_BYTES))
    except NotJson as error:
        raise PayloadError(f"payload: {error}") from None


def validate(model: type[ModelT], value: object) -> ModelT:
    """Return *value*, a parsed JSON value, as *model*.

    Raises:
        PayloadError: not of that shape.
    """
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise PayloadError(_describe(error)) from None


def _describe_one(detail: ErrorDetails) -> str:
    where = ".".join(map(str, detail["loc"])) or "payload"
    # This is the one message that would quote its input.
    return f"{where}: {'unknown type' if detail['type'] == 'union_tag_invalid' else detail['msg']}"


def _describe(error: ValidationError) -> str:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    shown = [_describe_one(each) for each in details[:_ERRORS_SHOWN]]
    if len(details) > _ERRORS_SHOWN:
        shown.append(f"and {len(details) - _ERRORS_SHOWN} more")
    return "; ".join(shown)
