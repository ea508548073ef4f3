"""The arguments of a task's function: checked where it is enqueued, and once more before it runs."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from typing import Any, Final

from workers.chains import Continuation
from workers.tasks.codecs import Codec, codec_of
from workers.worker.handlers import Job

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

    def dump_result(self, result: object) -> object:
        """Return what the function returned in JSON's types; a continuation stays one."""
        return result if self.result is None or isinstance(result, Continuation) else self.result.dump(result)

    @cached_property
    def result(self) -> Codec | None:
        """How results are encoded; None if the function does not say what it returns."""
        return codec_of(self._hints["return"]) if "return" in self._hints else None

    @cached_property
    def _codecs(self) -> Mapping[str, Codec]:
        return {name: codec_of(self._hints[name]) for name in self._signature.parameters}

    @cached_property
    def _hints(self) -> Mapping[str, Any]:  # Any: see `codecs.Hint`
        return typing.get_type_hints(self.function, include_extras=True)

    def _dump(self, name: str, value: object) -> object:
        try:
            return self._codecs[name].dump(value)
        except TypeError as error:
            problem = str(error)
        raise TypeError(f"{name}: {problem}")

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
