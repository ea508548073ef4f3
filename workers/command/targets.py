"""What a command is about: a queue of the application's, as `module:attribute`, or a storage's URL."""

from __future__ import annotations

import importlib
import traceback
from types import ModuleType

from workers.command.problems import CommandError
from workers.errors import StorageError, Unsupported
from workers.foreground import RunsAtImport, importing
from workers.queue import Queue
from workers.storage import open_storage
from workers.tasks import Tasks


def working_queue(target: str) -> Queue:
    """Return the queue `module:attribute`, which has handlers; `Tasks` stand for their queue, with them as handlers.

    Raises:
        CommandError: there is no such module or attribute, it is something else, or it has no handlers.
    """
    if "://" in target:
        raise CommandError(
            f"{_shown(target)} is a storage, and has no handlers; name the queue in your code, as shop:queue"
        )
    found = _found(target)
    if isinstance(found, Tasks):
        if not found.handlers():
            raise CommandError(f"{target} has no task: declare one, `@{target.partition(':')[2]}.task`, in that module")
        return _queue_of(found, target)
    if not found.has_handlers:
        raise CommandError(f"{target} has no handlers; call its execute() with them in that module")
    return found


def queue_of(target: str) -> Queue:
    """Return the queue that a URL names, or `module:attribute`.

    Raises:
        CommandError: see `working_queue`; the URL names no storage that can be used here.
    """
    if "://" in target:
        try:
            return Queue(open_storage(target))
        except StorageError as error:
            raise CommandError(str(error)) from None
    found = _found(target)
    return _queue_of(found, target) if isinstance(found, Tasks) else found


def _queue_of(tasks: Tasks, target: str) -> Queue:
    try:
        return tasks.working_queue()  # which warns of jobs that none of the tasks takes
    except Unsupported:
        raise CommandError(
            f"{target} are tasks of a queue that is no workers.Queue; its own workers run them, and its storage's URL"
            " names it to other commands"
        ) from None


def check_payload(target: str, name: str, payload: object) -> None:
    """Let the tasks check the payload, if the target is some.

    Raises:
        TypeError, ValueError: it does not fit.
    """
    found = None if "://" in target else _found(target)
    if isinstance(found, Tasks):
        found.check(name, payload)


def _found(target: str) -> Queue | Tasks:
    name, colon, path = target.partition(":")
    if not (name and colon and path):
        raise CommandError(f"{_shown(target)} is neither module:queue, as shop.jobs:queue, nor a storage's URL")
    if name.endswith(".py") or "/" in name:
        stem = name.removesuffix(".py").removeprefix("./").replace("/", ".")
        raise CommandError(f"{_shown(target)} names a file; name its module, as {stem}:{path}")
    module = _imported(name)
    found: object = module
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            raise CommandError(f"module {name!r} has no {path!r}{_others(module)}")
    if not isinstance(found, Queue | Tasks):
        kind = f"an instance of {type(found).__name__}"
        raise CommandError(f"{target} is {kind}, not a workers.Queue or workers.Tasks{_others(module)}")
    return found


def _imported(name: str) -> ModuleType:
    try:
        with importing():
            return importlib.import_module(name)
    except RunsAtImport as error:
        raise CommandError(f"module {name!r} cannot be imported: {error}") from None
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise CommandError(
                f"there is no module {error.name!r}; run this in the folder that has it, or add that to PYTHONPATH"
            ) from None
        raise CommandError(f"module {name!r} needs {error.name!r}, which is not installed") from None
    except Exception as error:
        lines = "".join(traceback.format_exception(error)).rstrip()
        raise CommandError(f"module {name!r} cannot be imported:\n{lines}") from None


def _others(module: ModuleType) -> str:
    names = sorted(name for name, value in vars(module).items() if isinstance(value, Queue | Tasks))
    return f"; it has {', '.join(names)}" if names else ""


def _shown(target: str) -> str:
    """Return the target without what may be a password."""
    scheme, separator, rest = target.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if separator else repr(target)
