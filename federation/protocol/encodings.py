"""Values as text on the wire.

JSON has bounds: we refuse what `JSON.parse` refuses, and hostile input always ends in one error type. Every model of a
JSON object drops unknown members and coerces nothing, and neither its errors nor its repr have content. Base64 is of
the standard alphabet, padded, without white space: exactly one spelling per value. Moments are written as JavaScript
writes them, and read more generously.
"""

from __future__ import annotations

import binascii
import gc
import json
from codecs import BOM_UTF8
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Annotated, TypeVar

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from federation.protocol.errors import NotJson, PayloadError

_MAX_DATE_CHARACTERS = 64
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
"""The time that peers write for no time at all, such as null."""


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def dump_json(value: object) -> str:
    """Return *value* as JSON text with compact separators and non-ASCII characters left as they are."""
    return _ENCODER.encode(value)


def encode_text(text: str) -> bytes:
    """Return the UTF-8 bytes of *text*, the form that is signed and sealed.

    Raises:
        PayloadError: lone surrogates, which JSON can escape and UTF-8 cannot hold.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        # From None: the original error holds the whole text.
        raise PayloadError(f"payload: lone surrogate at character {error.start}") from None


def parse_json(text: str | bytes, *, limit: int) -> object:
    """Return the value that *text* holds.

    *limit* is in characters for a `str`, otherwise in bytes of UTF-8; a leading byte order mark is skipped. `NaN` and
    `Infinity` are refused, as by `JSON.parse`, and so are integers beyond Python's digit limit (4300).

    Raises:
        NotJson: too long, not UTF-8, not JSON, or nested too deeply. The message gives a position, no content.
    """
    if len(text) > limit:
        raise NotJson(f"{len(text)} characters or bytes, more than the {limit} we parse")
    try:
        decoded = text.removeprefix(BOM_UTF8).decode() if isinstance(text, bytes) else text
        return _decode(decoded)
    except UnicodeDecodeError as error:
        raise NotJson(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        # From None: the original error holds the whole document.
        raise NotJson(f"not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise NotJson("not JSON we parse: nested too deeply") from None
    except ValueError as error:
        raise NotJson(f"not JSON we parse: {error}") from None


def is_json_object(text: str | bytes, *, limit: int) -> bool:
    """Tell whether *text* holds a JSON object. Nothing else is what a server of this protocol answers."""
    try:
        return isinstance(parse_json(text, limit=limit), dict)
    except NotJson:
        return False


def _decode(text: str) -> object:
    # The garbage collector would go through the growing document again and again and find nothing: a document made of
    # empty lists takes twenty times as long, and everything else in the process waits.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _DECODER.decode(text)
    finally:
        if was_enabled:
            gc.enable()


def encode_base64(raw: bytes) -> str:
    """Return *raw* in strict base64."""
    return binascii.b2a_base64(raw, newline=False).decode("ascii")


def decode_base64(text: object) -> bytes:
    """Return the bytes that *text* stands for.

    Raises:
        ValueError: *text* is not a string, or not the one strict spelling of any bytes. The message quotes nothing.
    """
    if not isinstance(text, str):
        raise ValueError("expected a base64 string")
    try:
        raw: bytes = msgspec.convert(text, bytes)  # as strict as `binascii`, in a quarter of the time
    except ValueError:  # msgspec's error is a ValueError; so is the one about lone surrogates
        raise ValueError("not strict base64 (standard alphabet, padded, no white space)") from None
    # msgspec accepts unused trailing bits, which only the last group has: two texts would then name one key.
    tail = (len(raw) - 1) // 3 * 3 if raw else 0
    if encode_base64(raw[tail:]) != text[tail // 3 * 4 :]:
        raise ValueError("not canonical base64 (unused bits are set)")
    return raw


def decode_base64_sized(text: object, size: int) -> bytes:
    """Return the *size* bytes that *text* stands for.

    Raises:
        ValueError: as `decode_base64`, or another size.
    """
    raw = decode_base64(text)
    if len(raw) != size:
        raise ValueError(f"expected {size} bytes, got {len(raw)}")
    return raw


def format_moment(moment: datetime) -> str:
    """Format *moment* as ISO-8601 UTC with milliseconds and `Z`; a naive one is UTC, as in the tables."""
    aware = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    return f"{aware.replace(tzinfo=None).isoformat(timespec='milliseconds')}Z"


def parse_moment(value: object) -> datetime:
    """Return the moment that *value* stands for, in UTC.

    Accepts what peers' `new Date(value)` accepts and senders plausibly write: ISO-8601 text (UTC if without offset),
    e-mail style dates, numbers of milliseconds since 1970, and null, which is 1970.

    Raises:
        ValueError: anything else, or a moment outside the years 1 to 9999.
    """
    if value is None:
        return EPOCH
    if isinstance(value, str):
        return _parse_text(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return EPOCH + timedelta(milliseconds=value)
        except (OverflowError, ValueError):
            raise ValueError("a number of milliseconds outside the years 1 to 9999") from None
    raise ValueError("expected a date as text or a number of milliseconds")


def _parse_text(text: str) -> datetime:
    if len(text) > _MAX_DATE_CHARACTERS:
        raise ValueError("too long for a date")
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        try:
            moment = parse(text)
            return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        except (ValueError, OverflowError):
            continue
    raise ValueError("not a date")


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
    if detail["type"] == "union_tag_invalid":  # the one message that would quote its input; what is known follows it
        return f"{where}: unknown type, not one of {detail['ctx']['expected_tags']}"
    return f"{where}: {detail['msg']}"


def _describe(error: ValidationError) -> str:
    details = error.errors(include_url=False, include_input=False)
    shown = [_describe_one(each) for each in details[:_ERRORS_SHOWN]]
    if len(details) > _ERRORS_SHOWN:
        shown.append(f"and {len(details) - _ERRORS_SHOWN} more")
    return "; ".join(shown)
