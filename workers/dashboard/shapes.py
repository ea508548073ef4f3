"""The shapes of an API's values: JSON Schema of their types, and values of these types from JSON that strangers sent.

A type is a dataclass, whose fields are annotated with what they are. `Annotated[str, "what it is"]` describes a field,
and `Annotated[int, Between(1, 200)]` bounds a number.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass
from datetime import date, datetime, timedelta
from enum import Enum
from typing import Annotated, Any, Final, Literal, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

Schema: TypeAlias = dict[str, object]
T = TypeVar("T")

LONGEST_TEXT: Final = 3_000
"""The most characters of a text that is sent to us, unless its field says otherwise."""
MOST_ITEMS: Final = 1_000
UNSTORABLE: Final = re.compile("[\x00\ud800-\udfff]")
"""Characters that no database stores."""

_PLAIN: Final[Mapping[object, Schema]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    type(None): {"type": "null"},
    datetime: {"type": "string", "format": "date-time"},
    date: {"type": "string", "format": "date"},
    timedelta: {"type": "number", "description": "seconds"},
}


class ShapeError(ValueError):
    """A value does not have the shape that was asked for; the message says where, and what is wrong."""


@dataclass(frozen=True, slots=True)
class Between:
    """The bounds of a number."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class Longest:
    """The bound of a text, in characters."""

    characters: int


class Schemas:
    """The schemas of types; those of dataclasses are in `components`, by their names, and referred to."""

    def __init__(self) -> None:
        self.components: dict[str, Schema] = {}
        self._names: dict[type, str] = {}

    def of(self, hint: Any) -> Schema:  # Any: an annotation, of whatever kind
        """Return the schema of an annotation.

        Raises:
            TypeError: there is no schema for it.
        """
        origin, arguments = get_origin(hint), get_args(hint)
        if hint in _PLAIN:
            return dict(_PLAIN[hint])
        if hint in (Any, object):
            return {}
        if origin is Annotated:
            return self._annotated(arguments[0], arguments[1:])
        if origin in (Union, types.UnionType):
            return {"anyOf": [self.of(each) for each in arguments]}
        if origin is Literal:
            return {"enum": [*arguments]}
        if inspect.isclass(origin) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(arguments[1])}
        if inspect.isclass(origin) and issubclass(origin, Sequence):
            return {"type": "array", "items": self.of(arguments[0])}
        if inspect.isclass(hint) and issubclass(hint, Enum):
            return {"type": "string", "enum": [each.value for each in hint]}
        if inspect.isclass(hint) and dataclasses.is_dataclass(hint):
            return {"$ref": f"#/components/schemas/{self._named(hint)}"}
        raise TypeError(f"there is no schema for {hint!r}")

    def _annotated(self, hint: Any, notes: Sequence[object]) -> Schema:  # Any: an annotation
        schema = self.of(hint)
        for note in notes:
            match note:
                case str():
                    schema["description"] = note
                case Between():
                    schema |= {"minimum": note.least, "maximum": note.most}
                case Longest():
                    schema["maxLength"] = note.characters
        return schema

    def _named(self, shape: type) -> str:
        if shape not in self._names:
            name = shape.__name__
            if name in self.components:  # of another package
                name = f"{shape.__module__.partition('.')[0].capitalize()}{name}"
            self._names[shape] = name
            self.components[name] = {}  # it may refer to itself
            self.components[name] = self.object_of(shape)
        return self._names[shape]

    def object_of(self, shape: type, *, needed: Sequence[str] | None = None) -> Schema:
        """Return the schema of a dataclass itself; by default it has all its fields."""
        properties = {name: self.of(hint) for name, hint in fields_of(shape).items()}
        return {
            "type": "object",
            "description": inspect.cleandoc(shape.__doc__ or ""),
            "properties": properties,
            "required": [*properties] if needed is None else [*needed],
            "additionalProperties": False,
        }


def fields_of(shape: type) -> dict[str, Any]:  # Any: annotations
    """Return the annotations of a dataclass's fields, by name."""
    hints = get_type_hints(shape, include_extras=True)
    return {each.name: hints[each.name] for each in dataclasses.fields(shape)}


def needed_in(shape: type) -> list[str]:
    """Return the names of a dataclass's fields that have no default."""
    fields = dataclasses.fields(shape)
    return [each.name for each in fields if each.default is MISSING and each.default_factory is MISSING]


def shaped(shape: type[T], given: object) -> T:
    """Return the dataclass that an object from outside says.

    Raises:
        ShapeError: it has another shape.
    """
    if not isinstance(given, dict):
        raise ShapeError("an object is expected")
    hints = fields_of(shape)
    if unknown := [name for name in given if name not in hints]:
        raise ShapeError(f"{unknown[0][:100]!r} is not known here; known are: {', '.join(hints) or 'nothing'}")
    if missing := [name for name in needed_in(shape) if name not in given]:
        raise ShapeError(f"{missing[0]!r} is missing")
    return shape(**{name: _checked(hints[name], value, name) for name, value in given.items()})


def from_text(shape: type, given: Mapping[str, str]) -> dict[str, object]:
    """Return texts, such as those in an address, as the types of the dataclass's fields, for `shaped` to check."""
    hints = fields_of(shape)
    return {name: _of_text(hints.get(name, str), text) for name, text in given.items()}


def _of_text(hint: Any, text: str) -> object:  # Any: an annotation
    plain = _plain(hint)
    if bool in plain and text in ("true", "false"):
        return text == "true"
    is_number = int in plain and text.isascii() and text.isdecimal() and len(text) < _DIGITS
    return int(text) if is_number else text


def _plain(hint: Any) -> Sequence[Any]:  # Any: annotations
    """Return the types of a union, without what describes them."""
    if get_origin(hint) is Annotated:
        return _plain(get_args(hint)[0])
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else [hint]


def _checked(hint: Any, value: object, at: str) -> object:  # Any: an annotation
    notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
    for each in _plain(hint):
        if (found := _as(each, value, at)) is not _OTHER:
            _check_bounds(found, notes, at)
            return found
    raise ShapeError(f"{at!r} is {' or '.join(_told(each) for each in _plain(hint))}")


def _as(hint: Any, value: object, at: str) -> object:  # Any: an annotation
    """Return the value as that type has it; `_OTHER` if it is none of these."""
    if get_origin(hint) is Literal:
        return value if value in get_args(hint) else _OTHER
    if inspect.isclass(hint) and issubclass(hint, Enum):
        return hint(value) if value in [each.value for each in hint] else _OTHER
    if inspect.isclass(get_origin(hint)) and issubclass(get_origin(hint), Sequence):
        if not isinstance(value, list):
            return _OTHER
        if len(value) > MOST_ITEMS:
            raise ShapeError(f"{at!r} has more than {MOST_ITEMS} items")
        return tuple(_checked(get_args(hint)[0], each, f"{at}[{place}]") for place, each in enumerate(value))
    return value if type(value) is hint else _OTHER


def _check_bounds(value: object, notes: Sequence[object], at: str) -> None:
    longest = next((each.characters for each in notes if isinstance(each, Longest)), LONGEST_TEXT)
    if isinstance(value, str) and len(value) > longest:
        raise ShapeError(f"{at!r} has more than {longest} characters")
    if isinstance(value, str) and UNSTORABLE.search(value):
        raise ShapeError(f"{at!r} has characters that no database stores")
    for note in notes:
        if isinstance(note, Between) and isinstance(value, int) and not note.least <= value <= note.most:
            raise ShapeError(f"{at!r} is between {note.least} and {note.most}")


def _told(hint: Any) -> str:  # Any: an annotation
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if inspect.isclass(hint) and issubclass(hint, Enum):
        return " or ".join(repr(each.value) for each in hint)
    if hint in _PLAIN:
        return f"of type {_PLAIN[hint]['type']}"
    return "a list"


_OTHER: Final = object()
_DIGITS: Final = 19
