"""What pydantic makes of the arguments and results of tasks: it reads what it wrote, or refuses to write it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
    """Values of one type, see `Codec`; `unordered` tells whether sets may be among them."""

    adapter: TypeAdapter[object]
    unordered: bool

    @classmethod
    def of(cls, hint: Hint) -> Self:
        """Return those of the annotated type.

        Raises:
            TypeError: pydantic does not know it.
        """
        try:
            adapter: TypeAdapter[object] = TypeAdapter(hint)
            return cls(adapter, _may_hold_sets(adapter.core_schema))
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
        return None


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


def _may_hold_sets(schema: object) -> bool:
    """Tell whether pydantic's schema of a type allows sets somewhere."""
    inner = [schema]
    for each in inner:  # which grows meanwhile
        if isinstance(each, Mapping):
            if each.get("type") in ("set", "frozenset", "any"):
                return True
            inner += each.values()
        elif isinstance(each, list | tuple):
            inner += each
    return False


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
