"""What pydantic makes of the arguments and results of tasks: it reads what it wrote, or refuses to write it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final, Self

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import PydanticSerializationError

from workers.tasks.misfits import Hint, Lost, Misfit

# Any: they are arguments of several types.
_WAYS: Final[tuple[dict[str, Any], ...]] = ({"round_trip": True}, {"round_trip": True, "by_alias": True})
"""How else pydantic may write a value: models with aliases or computed fields are not read as it writes them first."""


@dataclass(frozen=True, slots=True)
class ByPydantic:
    """Values of one type, see `Codec`.

    `unordered` tells whether sets may be among them, and `ambiguous` whether a text may stand for a value of another
    type, which an annotation names: a union does so, while `Any` takes what JSON has.
    """

    adapter: TypeAdapter[object]
    unordered: bool
    ambiguous: bool

    @classmethod
    def of(cls, hint: Hint) -> Self:
        """Return those of the annotated type.

        Raises:
            TypeError: pydantic does not know it.
        """
        try:
            adapter: TypeAdapter[object] = TypeAdapter(hint)
            kinds = _kinds_in(adapter.core_schema)
            unordered = not kinds.isdisjoint(("set", "frozenset", "any"))
            return cls(adapter, unordered, ambiguous="union" in kinds and "any" not in kinds)
        except PydanticUserError as error:
            raise TypeError(f"pydantic cannot check {hint!r}: {error.message.splitlines()[0]}") from None

    def take(self, value: object) -> object:
        """Check what a caller gives."""
        try:
            return self.adapter.validate_python(value)
        except ValidationError as error:
            problems = error.errors(include_input=False, include_context=False, include_url=False)
        raise ValueError("; ".join(_problem(problem["loc"], problem["msg"]) for problem in problems))

    def load(self, value: object) -> object:
        """Check what `dump` made."""
        try:
            return self.take(value)
        except ValueError as error:
            problem = str(error)
        try:  # what is strict takes a text for a time, and a list for a tuple, from JSON alone
            return self.adapter.validate_json(json.dumps(value))
        except (TypeError, ValueError, RecursionError):
            pass
        raise ValueError(problem)

    def dump(self, value: object) -> object:
        """Return it in JSON's types, as one of the ways has it that bring it back."""
        try:
            dumped = self._written(value)
        except PydanticSerializationError:
            dumped = self.adapter.dump_python(value, mode="json", warnings="none")
            why = self._lost(value, dumped)
            raise Misfit(dumped) if why is None else Lost(dumped, why) from None
        why = self._lost(value, dumped)
        if why is None:
            return dumped
        for other in (self._written(value, **way) for way in _WAYS):
            if self._lost(value, other) is None:
                return other
        raise Lost(dumped, why)

    def _written(self, value: object, **way: Any) -> object:  # Any: see `_WAYS`
        dumped = self.adapter.dump_python(value, mode="json", warnings="error", **way)
        if not self.unordered or _is_same(value, dumped):
            return dumped
        return _in_order(dumped, self.adapter.dump_python(value, warnings="none", **way))

    def _lost(self, value: object, dumped: object) -> str | None:
        """Say why the value would not be there again, None if it would, or is something of its kind at least."""
        if _is_same(value, dumped):
            return None
        try:
            again = self.load(dumped)
        except ValueError as error:
            return f"what is stored of it would not be read again: {error}"
        if any(text == _MASK for text in _scalars(dumped)) and again != value:
            return "a secret in it would be stored as asterisks"
        kind = _read_as_text(value, again) if self.ambiguous else None
        return None if kind is None else f"a {kind} in it would be read again as str, which its annotation allows, too"


def _is_same(value: object, dumped: object) -> bool:
    """Tell whether the value is in JSON's types already, without any sets."""
    return type(dumped) is type(value) and bool(dumped == value)


def _problem(place: tuple[int | str, ...], message: str) -> str:
    return f"{'.'.join(map(str, place))}: {message}" if place else message


_MASK: Final = "*" * 10
"""What pydantic writes for a secret."""


def _scalars(value: object) -> Iterable[object]:
    """Yield what is in the value, but for what contains something."""
    inner = [value]
    for each in inner:  # which grows meanwhile
        if isinstance(each, dict):
            inner += each.values()
        elif isinstance(each, list):
            inner += each
        else:
            yield each


def _kinds_in(schema: object) -> AbstractSet[object]:
    """Return the kinds of what pydantic's schema of a type has somewhere."""
    inner, kinds = [schema], set[object]()
    for each in inner:  # which grows meanwhile
        if isinstance(each, Mapping):
            if isinstance(kind := each.get("type"), str):
                kinds.add(kind)
            inner += each.values()
        elif isinstance(each, list | tuple):
            inner += each
    return kinds


def _read_as_text(value: object, again: object) -> str | None:
    """Return the type of something in the value that is another text when it is read again; None if nothing is."""
    pairs = [(value, again)]
    for before, after in pairs:  # which grows meanwhile
        if isinstance(after, str) and not isinstance(before, str) and before != after:
            return type(before).__name__
        if type(before) is not type(after):
            continue
        if isinstance(before, dict) and isinstance(after, dict):
            pairs += ((each, after[key]) for key, each in before.items() if key in after)
        elif isinstance(before, list | tuple) and isinstance(after, list | tuple):
            pairs += zip(before, after, strict=False)
        elif hasattr(before, "__dict__"):  # a model, or a dataclass
            pairs.append((vars(before), vars(after)))
    return None


def _in_order(dumped: object, plain: object) -> object:
    """Return the value with what was a set in `plain`, which is the same in Python's types, in one order."""
    if isinstance(dumped, dict) and isinstance(plain, dict) and len(dumped) == len(plain):
        return {key: _in_order(one, other) for (key, one), other in zip(dumped.items(), plain.values(), strict=True)}
    if (
        not isinstance(dumped, list)
        or not isinstance(plain, list | tuple | set | frozenset)
        or len(dumped) != len(plain)
    ):
        return dumped
    items = [_in_order(one, other) for one, other in zip(dumped, plain, strict=True)]
    return sorted(items, key=_text_of) if isinstance(plain, set | frozenset) else items


def _text_of(value: object) -> str:
    return json.dumps(value, sort_keys=True)
