"""The arguments of a task's function: checked at the enqueue and before the run, as values for any serde."""

from __future__ import annotations

import inspect
import logging
import types
import typing
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Final, TypeAlias

from workers.chains import Continuation
from workers.checks import reworded
from workers.errors import UnrecoverableError
from workers.serde import non_finite, odd_key
from workers.worker.handlers import Job

_LOG = logging.getLogger(__name__)

# Any: a type annotation is whatever its author wrote.
Hint: TypeAlias = Any


class Misfit(ValueError):
    """A value is not what its annotation says; `dumped` is what was made of it nevertheless."""

    def __init__(self, dumped: object) -> None:
        super().__init__("it is not what its annotation says")
        self.dumped = dumped


@dataclass(frozen=True, slots=True)
class Codec:
    """`load` checks a value, and returns it as its annotation says; `dump` returns it in JSON's types.

    `load` raises `ValueError` for a value that does not fit, without quoting it. `dump` raises `TypeError` for keys
    that would not come back, `ValueError` for numbers that would not, and `Misfit` for what the annotation does not
    allow.
    """

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

    return Codec(codec.load, dump)


def _of_pydantic(hint: Hint) -> Codec:
    from pydantic import TypeAdapter, ValidationError
    from pydantic.errors import PydanticUserError
    from pydantic_core import PydanticSerializationError

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

    def dump(value: object) -> object:
        try:
            return adapter.dump_python(value, mode="json", warnings="error")
        except PydanticSerializationError:
            dumped = adapter.dump_python(value, mode="json", warnings="none")
        raise Misfit(dumped)

    return Codec(load, dump)


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


Function = Callable[..., object]

_NAMED: Final = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def takes_only_job(function: Function) -> bool:
    """Tell whether it is a handler, which has one parameter, the job."""
    parameters = list(inspect.signature(function).parameters.values())
    return len(parameters) == 1 and (_is_job(parameters[0]) or parameters[0].annotation is inspect.Parameter.empty)


def _is_job(parameter: inspect.Parameter) -> bool:
    """Tell by its annotation, which may be a text; other annotations may not be resolvable yet."""
    return parameter.annotation is Job or parameter.annotation in ("Job", "workers.Job")


class Arguments:
    """The annotated parameters of `function`, and the type of its result; a first parameter `Job` is the job's own.

    Annotations are resolved when they are first needed: they may name what is defined further down.

    Raises:
        TypeError: a parameter has no annotation, or is none that a name can be given to.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        signature = inspect.signature(function)
        parameters = list(signature.parameters.values())
        self.takes_job = bool(parameters) and _is_job(parameters[0])
        own = parameters[1:] if self.takes_job else parameters
        for parameter in own:
            _check(parameter)
        self._signature = signature.replace(parameters=own)

    @property
    def names(self) -> Collection[str]:
        """What the arguments are called."""
        return self._signature.parameters

    def encoded(self, *given: object, **named: object) -> dict[str, object]:
        """Return the arguments by name, in JSON's types.

        Raises:
            TypeError: one is missing, there is no such parameter, or one has keys that do not come back.
            ValueError: one does not fit its annotation; it is not quoted.
        """
        bound = self._signature.bind(*given, **named).arguments
        return {name: self._dump(name, self._load(name, value)) for name, value in bound.items()}

    def decoded(self, payload: object) -> Mapping[str, object]:
        """Return the arguments in a payload as their annotations say.

        Raises:
            TypeError, ValueError: as `encoded`; the payload has no names.
        """
        if not isinstance(payload, dict) or not all(isinstance(name, str) for name in payload):
            raise TypeError(f"arguments have names; this is {type(payload).__name__}")
        bound = self._signature.bind(**payload).arguments
        return {name: self._load(name, value) for name, value in bound.items()}

    def completed(self, data: object) -> object:
        """Return the arguments in a payload with the defaults of those it leaves out, in JSON's types."""
        return {**self._defaults, **data} if isinstance(data, dict) else data

    def dump_result(self, result: object) -> object:
        """Return what the function returned in JSON's types; a continuation stays one.

        What its annotation does not allow is told in the log and goes on: the function has run.

        Raises:
            UnrecoverableError: it cannot be encoded, as another run's could not.
        """
        if self.result is None or isinstance(result, Continuation):
            return result
        try:
            return self.result.dump(result)
        except Misfit as misfit:
            _LOG.warning(
                "%s returned a %s, which its annotation does not allow",
                self.function.__qualname__,
                type(result).__name__,
            )
            return misfit.dumped
        except (TypeError, ValueError) as error:
            raise UnrecoverableError(
                f"the function's result of type {type(result).__name__} cannot be encoded: {type(error).__name__}"
            ) from error

    def loaded(self, result: object) -> object:
        """Return the decoded result as the function's annotation says."""
        return result if self.result is None else self.result.load(result)

    @cached_property
    def result(self) -> Codec | None:
        """How results are encoded; None if the function does not say what it returns."""
        return codec_of(self._hints["return"]) if "return" in self._hints else None

    @cached_property
    def _codecs(self) -> Mapping[str, Codec]:
        return {name: codec_of(self._hints[name]) for name in self._signature.parameters}

    @cached_property
    def _defaults(self) -> Mapping[str, object]:
        """The defaults that could be given as arguments; others are no values that anything is compared by."""
        found: dict[str, object] = {}
        for name, parameter in self._signature.parameters.items():
            if parameter.default is not inspect.Parameter.empty:
                with suppress(TypeError, ValueError):
                    found[name] = self._dump(name, self._load(name, parameter.default))
        return found

    @cached_property
    def _hints(self) -> Mapping[str, Any]:  # Any: see `codecs.Hint`
        return typing.get_type_hints(self.function, include_extras=True)

    def _dump(self, name: str, value: object) -> object:
        problem: Exception
        try:
            return self._codecs[name].dump(value)
        except Misfit as misfit:
            return misfit.dumped  # `load` has returned it
        except (TypeError, ValueError) as error:
            problem = reworded(error, f"{name}: {error}")
        raise problem

    def _load(self, name: str, value: object) -> object:
        try:
            return self._codecs[name].load(value)
        except ValueError as error:
            problem = str(error)
        raise ValueError(f"{name}: {problem}")


def _check(parameter: inspect.Parameter) -> None:
    if parameter.kind not in _NAMED:
        raise TypeError(f"parameter {str(parameter)!r}: a job has its arguments by name")
    if parameter.annotation is inspect.Parameter.empty:
        raise TypeError(f"parameter {parameter.name!r} needs an annotation, by which arguments are checked")
