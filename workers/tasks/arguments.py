"""The arguments of a task's function: checked at the enqueue and before the run, as values for any serde."""

from __future__ import annotations

import inspect
import logging
import typing
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import cached_property
from typing import Any, Final

from workers.chains import Continuation
from workers.checks import reworded
from workers.errors import UnrecoverableError
from workers.tasks.codecs import Codec, codec_of
from workers.tasks.misfits import Lost, Misfit
from workers.worker.handlers import Job

_LOG = logging.getLogger(__name__)

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
            ValueError: one does not fit its annotation, or would not be read again as what it is; it is not quoted.
        """
        bound = self._signature.bind(*given, **named).arguments
        return {name: self._stored(name, value) for name, value in bound.items()}

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
            why = str(misfit).partition(":")[0]  # what follows is perhaps a validator's text, with values in it
            _LOG.warning("%s returned a %s: %s", self.function.__qualname__, type(result).__name__, why)
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
                    found[name] = self._stored(name, parameter.default)
        return found

    @cached_property
    def _hints(self) -> Mapping[str, Any]:  # Any: see `codecs.Hint`
        return typing.get_type_hints(self.function, include_extras=True)

    def _stored(self, name: str, given: object) -> object:
        problem: Exception
        try:
            codec = self._codecs[name]
            return codec.dump(codec.take(given))
        except Lost as lost:
            problem = ValueError(f"{name}: {lost}")
        except Misfit as misfit:
            return misfit.dumped  # `take` has returned it
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
