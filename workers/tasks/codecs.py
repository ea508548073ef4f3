"""Values of annotated types as what any serde can encode, and back: by pydantic or msgspec if one is installed."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final, TypeAlias

from workers.serde import odd_key

# Any: a type annotation is whatever its author wrote.
Hint: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Codec:
    """`load` checks a value, and returns it as its annotation says; `dump` returns it in JSON's types.

    `load` raises `ValueError` for a value that does not fit, without quoting it. `dump` raises `TypeError` for keys
    that would not come back.
    """

    load: Callable[[object], object]
    dump: Callable[[object], object]


def codec_of(hint: Hint) -> Codec:
    """Return how values of the annotated type are checked and encoded here.

    Raises:
        TypeError: the library that checks does not know the type.
    """
    if find_spec("pydantic") is not None:
        return _keeping_keys(_of_pydantic(hint))
    if find_spec("msgspec") is not None:
        return _keeping_keys(_of_msgspec(hint))
    return _plain(hint)


def _keeping_keys(codec: Codec) -> Codec:
    """Refuse what both libraries do: they make each key a text, also where no annotation says which type it had."""

    def comes_back(value: object, dumped: object) -> bool:
        try:
            return codec.load(dumped) == value
        except ValueError:
            return False

    def dump(value: object) -> object:
        dumped, odd = codec.dump(value), odd_key(value)
        if odd is not None and not comes_back(value, dumped):
            raise TypeError(f"keys that are no text have a type in the annotation, as dict[int, str]; {odd}")
        return dumped

    return Codec(codec.load, dump)


def _of_pydantic(hint: Hint) -> Codec:
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticUserError

    try:
        adapter: TypeAdapter[object] = TypeAdapter(hint)
    except PydanticUserError as error:
        raise TypeError(f"pydantic cannot check {hint!r}: {error.message.splitlines()[0]}") from None

    def load(value: object) -> object:
        try:
            return adapter.validate_python(value)
        except ValidationError as error:
            problems = error.errors(include_input=False, include_context=False, include_url=False)
        raise ValueError("; ".join(_problem(problem["loc"], problem["msg"]) for problem in problems))

    return Codec(load, lambda value: adapter.dump_python(value, mode="json"))


def _problem(place: tuple[int | str, ...], message: str) -> str:
    return f"{'.'.join(map(str, place))}: {message}" if place else message


def _of_msgspec(hint: Hint) -> Codec:
    import msgspec

    def load(value: object) -> object:
        try:
            return msgspec.convert(msgspec.to_builtins(value), hint, str_keys=True)
        except msgspec.ValidationError as error:
            problem = str(error)
        raise ValueError(problem)

    return Codec(load, lambda value: msgspec.to_builtins(value, str_keys=True))


def _plain(hint: Hint) -> Codec:
    """Check plain types alone: what no library is there to check is taken as it is."""
    allowed = _classes(hint)

    def load(value: object) -> object:
        fits = allowed is None or isinstance(value, allowed) or (float in allowed and type(value) is int)
        if not fits or (isinstance(value, bool) and allowed is not None and bool not in allowed):
            raise ValueError(f"should be {hint!r}, not {type(value).__name__}")
        return value

    return Codec(load, lambda value: value)


_PLAIN: Final[tuple[type, ...]] = (bool, int, float, str, list, dict, types.NoneType)


def _classes(hint: Hint) -> tuple[type, ...] | None:
    """Return the plain types that values of the annotation have, or None if it has others too."""
    origin: object = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        members = [_classes(each) for each in typing.get_args(hint)]
        return None if None in members else tuple(each for member in members for each in member or ())
    found = hint if origin is None else origin
    return next(((each,) for each in _PLAIN if each is found), None)
