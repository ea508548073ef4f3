"""How values of an annotated type are checked, and become values for any serde: by pydantic, msgspec, or neither."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final

from workers.serde import non_finite, odd_key
from workers.tasks.misfits import Hint


@dataclass(frozen=True, slots=True)
class Codec:
    """`take` checks what a caller gives, and `load` what `dump` made; both return it as its annotation says.

    They raise `ValueError` for a value that does not fit, without quoting it. `dump` returns a value in JSON's types,
    and a set always in the same order, by which enqueues are compared. It raises `TypeError` for keys that would not
    come back, `ValueError` for numbers that would not, `Lost` for what else would not, and `Misfit` for what the
    annotation does not allow.
    """

    take: Callable[[object], object]
    load: Callable[[object], object]
    dump: Callable[[object], object]


def codec_of(hint: Hint) -> Codec:
    """Return how values of the annotated type are checked and encoded here.

    Raises:
        TypeError: the library that checks does not know the type.
    """
    if find_spec("pydantic") is not None:
        return _losing_nothing(_of_pydantic(hint))
    if find_spec("msgspec") is not None:
        return _losing_nothing(_of_msgspec(hint))
    return _plain(hint)


def _losing_nothing(codec: Codec) -> Codec:
    """Refuse what the libraries do: they make each key a text, also where no annotation says which type it had, and
    pydantic makes NaN and infinity null there.
    """

    def comes_back(value: object, dumped: object) -> bool:
        try:
            return codec.load(dumped) == value
        except ValueError:
            return False

    def dump(value: object) -> object:
        dumped, odd = codec.dump(value), odd_key(value)
        if odd is not None and not comes_back(value, dumped):
            raise TypeError(f"keys that are no text have a type in the annotation, as dict[int, str]; {odd}")
        infinite = non_finite(value)
        if infinite and len(non_finite(dumped)) < len(infinite):
            raise ValueError(f"NaN and infinity are no numbers in JSON; this is one: {infinite[0]}")
        return dumped

    return Codec(codec.take, codec.load, dump)


def _of_pydantic(hint: Hint) -> Codec:
    from workers.tasks.by_pydantic import ByPydantic

    values = ByPydantic.of(hint)
    return Codec(values.take, values.load, values.dump)


def _of_msgspec(hint: Hint) -> Codec:
    import msgspec

    def load(value: object) -> object:
        try:
            return msgspec.convert(msgspec.to_builtins(value), hint, str_keys=True)
        except msgspec.ValidationError as error:
            problem = str(error)
        raise ValueError(problem)

    def dump(value: object) -> object:
        dumped = msgspec.to_builtins(value, str_keys=True)
        return _as_given(dumped, msgspec.to_builtins(value, str_keys=True, order="deterministic"))

    return Codec(load, load, dump)


def _as_given(dumped: object, ordered: object) -> object:
    """Return `ordered` with the keys of its objects in the order in which `dumped` has them."""
    if isinstance(dumped, dict) and isinstance(ordered, dict) and dumped.keys() == ordered.keys():
        return {key: _as_given(each, ordered[key]) for key, each in dumped.items()}
    if isinstance(dumped, list) and isinstance(ordered, list):
        return [_as_given(one, other) for one, other in zip(dumped, ordered, strict=True)]
    return ordered


def _plain(hint: Hint) -> Codec:
    """Check plain types alone: what no library is there to check is taken as it is."""
    allowed = _classes(hint)

    def load(value: object) -> object:
        fits = allowed is None or isinstance(value, allowed) or (float in allowed and type(value) is int)
        if not fits or (isinstance(value, bool) and allowed is not None and bool not in allowed):
            raise ValueError(f"should be {hint!r}, not {type(value).__name__}")
        return value

    return Codec(load, load, lambda value: value)


_PLAIN: Final[tuple[type, ...]] = (bool, int, float, str, list, dict, types.NoneType)


def _classes(hint: Hint) -> tuple[type, ...] | None:
    """Return the plain types that values of the annotation have, or None if it has others too."""
    origin: object = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        members = [_classes(each) for each in typing.get_args(hint)]
        return None if None in members else tuple(each for member in members for each in member or ())
    found = hint if origin is None else origin
    return next(((each,) for each in _PLAIN if each is found), None)
