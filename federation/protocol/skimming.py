"""JSON of strangers, of which only the requested parts are built.

Theory of operation. A parsed document takes up to thirty times the memory of its text, and parsing blocks the whole
process. We read only a few members of what a peer writes, and the peer may fill the rest with anything. So a first pass
finds the members that a shape names, and checks and skips all others, which builds nothing; only what was found is
parsed, with `parse_json` and its rules. Where a shape wants a scalar, an object or array is recognised as such and
stays empty.

The first pass refuses one thing that `parse_json` accepts: escapes of half a surrogate pair. A short text that it
refuses is therefore parsed as a whole, so that the answer, and the reason for it, is always that of `parse_json`. In a
long one such escapes become NUL, which no member of ours may contain either.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum, auto
from functools import cache, cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeAlias, Union, get_args, get_origin

import msgspec

from federation.protocol.encodings import MAX_PAYLOAD_BYTES, ModelT, WireModel, parse_json, validate
from federation.protocol.errors import NotJson, PayloadError

SHORT_BYTES: Final = 64 * 1024
"""A text up to this length that cannot be skimmed is parsed as a whole."""

_MOST_HALVES: Final = 10_000
_PIECE: Final = 64 * 1024
_BYTE_ORDER_MARK: Final = codecs.BOM_UTF8
_SURROGATE = re.compile(
    rb"(\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})|\\u[dD][89a-fA-F][0-9a-fA-F]{2}|(\\[^u])"
)


class Leaf(Enum):
    """A value without members of its own to look for."""

    SCALAR = auto()
    """Text, number, true, false or null."""
    WHOLE = auto()
    """Any value; it is built completely."""


@dataclass(frozen=True, kw_only=True)
class Members:
    """The relevant members of an object, by their names in JSON; in a list, each must have the `required` ones."""

    shapes: Mapping[str, Shape]
    required: frozenset[str] = frozenset()

    def __or__(self, other: Members) -> Members:
        """Return what is relevant to either."""
        return Members(shapes={**self.shapes, **other.shapes}, required=self.required & other.required)

    @cached_property
    def one(self) -> msgspec.json.Decoder[Any]:  # decodes a struct that is made at run time
        return msgspec.json.Decoder(self._struct(frozenset()))

    @cached_property
    def many(self) -> msgspec.json.Decoder[Any]:  # as above
        return msgspec.json.Decoder(list[self._struct(self.required)])  # type: ignore[misc] # made at run time

    def _struct(self, required: frozenset[str]) -> type[msgspec.Struct]:
        optional = [
            (name, msgspec.Raw | msgspec.UnsetType, msgspec.UNSET) for name in self.shapes if name not in required
        ]
        return msgspec.defstruct("Skimmed", [*((name, msgspec.Raw) for name in required), *optional], gc=False)

    def read(self, raw: bytes | bytearray | msgspec.Raw) -> dict[str, object]:
        """Build the relevant members of *raw*, an object in JSON."""
        return self.found(self.one.decode(raw))

    def found(self, struct: msgspec.Struct) -> dict[str, object]:
        """Build what *struct* holds."""
        raws = ((name, getattr(struct, name)) for name in self.shapes)
        return {name: _built(raw, self.shapes[name]) for name, raw in raws if raw is not msgspec.UNSET}


@dataclass(frozen=True, kw_only=True)
class Each:
    """An array of such objects."""

    of: Members


Shape: TypeAlias = Leaf | Members | Each


def skim(text: str | bytes | bytearray, shape: Members, *, limit: int) -> object:
    """Return the parts of the object in *text* that *shape* names. What is no object comes back empty.

    *limit* is as for `parse_json`. Members that are not named are only checked to be JSON.

    Raises:
        NotJson: as `parse_json`.
    """
    if len(text) > limit:
        raise NotJson(f"{len(text)} characters or bytes, more than the {limit} we parse")
    raw = None
    try:
        raw = text.encode() if isinstance(text, str) else _utf8(text)
        return shape.read(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        if len(text) <= SHORT_BYTES:
            return parse_json(text if isinstance(text, str) else bytes(text), limit=limit)
        if raw is None:
            raise NotJson("not UTF-8") from None
        return _read_odd(raw, shape, error)


def _read_odd(raw: bytes | bytearray, shape: Members, error: Exception) -> object:
    """Do the same as `skim` for a long text that was refused with *error*."""
    try:
        if isinstance(error, msgspec.ValidationError) or b"\\u" not in raw:
            raise error
        return shape.read(_without_halves(raw))
    except msgspec.ValidationError:  # JSON as far as it was read, and no object
        return None
    except msgspec.DecodeError as problem:
        raise NotJson(f"not JSON: {problem}") from None
    except RecursionError:
        raise NotJson("not JSON we parse: nested too deeply") from None


def read_model(model: type[ModelT], text: str) -> ModelT:
    """Return the *model* in a JSON plaintext, without building anything else of it.

    Raises:
        PayloadError: as `parse_model`.
    """
    try:
        return validate(model, skim(text, members_of(model), limit=MAX_PAYLOAD_BYTES))
    except NotJson as error:
        raise PayloadError(f"payload: {error}") from None


@cache
def members_of(model: type[WireModel]) -> Members:
    """Return the members that *model* reads."""
    fields = {field.alias or name: field for name, field in model.model_fields.items()}
    return Members(
        shapes={name: _shape_of(field.annotation) for name, field in fields.items()},
        required=frozenset(name for name, field in fields.items() if field.is_required()),
    )


def _shape_of(annotation: object) -> Shape:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _shape_of(arguments[0])
    if isinstance(annotation, type) and issubclass(annotation, WireModel):
        return members_of(annotation)
    if origin is list and isinstance(item := _shape_of(arguments[0]), Members):
        return Each(of=item)
    if origin in (Union, UnionType):
        return _either([_shape_of(each) for each in arguments])
    return Leaf.SCALAR if origin is Literal or annotation in _SCALARS else Leaf.WHOLE


def _either(shapes: list[Shape]) -> Shape:
    if all(isinstance(each, Members) for each in shapes):
        first, *others = (each for each in shapes if isinstance(each, Members))
        for other in others:
            first |= other
        return first
    return Leaf.SCALAR if set(map(type, shapes)) == {Leaf} and Leaf.WHOLE not in shapes else Leaf.WHOLE


def _built(raw: msgspec.Raw, shape: Shape) -> object:
    first = bytes(memoryview(raw)[:1])
    if isinstance(shape, Members) and first == b"{":
        return shape.read(raw)
    if isinstance(shape, Each) and first == b"[":
        return _list(raw, shape.of)
    if shape is not Leaf.WHOLE and first in (b"{", b"["):
        return {} if first == b"{" else []
    text = bytes(raw)
    if first == b'"' and b"\\" not in text and text.isascii():  # most large values are base64
        return text[1:-1].decode("ascii")
    return parse_json(text, limit=len(text))


def _list(raw: msgspec.Raw, of: Members) -> list[object]:
    try:
        return [of.found(each) for each in of.many.decode(raw)]
    except msgspec.ValidationError:  # `validate` has to say what is wrong with the first bad one
        return [{}]


def _utf8(text: bytes | bytearray) -> bytes | bytearray:
    """Return *text* without a byte order mark.

    Raises:
        UnicodeDecodeError: it is not UTF-8 throughout.
    """
    if text.isascii():
        return text
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(text), _PIECE):
        decoder.decode(text[start : start + _PIECE])
    decoder.decode(b"", final=True)
    return text[len(_BYTE_ORDER_MARK) :] if text[:3] == _BYTE_ORDER_MARK else text


def _without_halves(raw: bytes | bytearray) -> bytes:
    if raw.count(b"\\ud") + raw.count(b"\\uD") > _MOST_HALVES:
        raise NotJson("not JSON we parse: too many surrogates")
    return _SURROGATE.sub(lambda match: match[0] if match[1] or match[2] else b"\\u0000", bytes(raw))


_SCALARS: Final = frozenset({str, int, float, bool, datetime, None, NoneType})
