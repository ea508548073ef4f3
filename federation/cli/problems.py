"""How a command reports that it could not do what it was asked: in one line on stderr if one is enough.

With `--json` it reports a document on stdout, which `docs/cli-json.md` describes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NoReturn

from federation.base.terminal import escaped_json, spaced

if TYPE_CHECKING:
    from sqlalchemy.exc import SQLAlchemyError

NOT_FOUND: Final = 1
USAGE_ERROR: Final = 2
INTERRUPTED: Final = 130


class Kind(StrEnum):
    """The kinds of errors, by which a program may tell them apart."""

    USAGE = "usage"
    NO_NODE_HERE = "no_node_here"
    SETTINGS = "settings"
    UNREACHABLE = "unreachable"
    REFUSED = "refused"
    MISSING_PACKAGE = "missing_package"
    NOT_DONE = "not_done"
    INTERRUPTED = "interrupted"
    BUG = "bug"


class _Expected:
    """The state of this process; `expect` writes it."""

    as_json: bool | None = None
    are_texts: bool = True


def expect(arguments: Sequence[str]) -> None:
    """Report errors of this process as these arguments of a command want it; they may be wrong in other respects."""
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    _Expected.as_json = "--json" in options
    _Expected.are_texts = not any("\udc80" <= mark <= "\udcff" for each in arguments for mark in each)


def asked_for_json() -> bool:
    """Tell whether errors are reported to a program."""
    if _Expected.as_json is None:  # no command has begun yet
        expect(sys.argv[1:])
    return bool(_Expected.as_json)


def fail(*lines: str, status: int = USAGE_ERROR, kind: Kind | None = None) -> NoReturn:
    """End the process with `status` and these lines on stderr, or with `--json` as one document on stdout."""
    if asked_for_json():
        message, *details = lines
        kind = kind or (Kind.NOT_DONE if status == NOT_FOUND else Kind.USAGE)
        error = {"kind": kind.value, "message": message.removesuffix(":"), "details": details}
        document = escaped_json(json.dumps({"error": error}, ensure_ascii=False, indent=2))
        print(document, flush=True)  # noqa: T201 - what this is for
    else:
        told = map(spaced, lines)
        print("federation:", *told, sep="\n  " if len(lines) > 1 else " ", file=sys.stderr)  # noqa: T201 - likewise
    sys.exit(status)


def complete(action: Callable[[], object]) -> None:
    """Run the action. If it fails, end the process with 2 and what to do on stderr, or after Ctrl-C with 130."""
    try:
        action()
    except KeyboardInterrupt:
        interrupted()
    except Exception as error:
        if _is_interrupt(error):
            interrupted()
        if explain(error):
            tell(error)
        if asked_for_json():
            with suppress(SystemExit):
                fail(f"a bug of ours: {type(error).__name__}; its traceback is on stderr", kind=Kind.BUG)
        raise


def tell(error: Exception) -> NoReturn:
    """End the process as `fail` does, with what `explain` says about the error."""
    fail(*explain(error), kind=_kind(error))


def _is_interrupt(error: BaseException | None) -> bool:
    """Tell whether Ctrl-C caused the error: on its way out it may have been replaced by another exception."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def interrupted() -> NoReturn:
    """End the process as Ctrl-C requires."""
    fail("interrupted", status=INTERRUPTED, kind=Kind.INTERRUPTED)


def explain(error: BaseException) -> list[str]:
    """Return what to tell the user, or nothing for what only a traceback explains."""
    # Imported here, because a command that succeeds need not load what could have failed.
    from sqlalchemy.exc import SQLAlchemyError

    from federation.base.errors import ConfigurationError
    from workers import StorageError
    from workers.errors import ForeignQueue, ServerUnfit
    from workers.extras import extra_with, install

    match error:
        case _ if _is_about_arguments(error):
            return ["an argument is no text in UTF-8"]
        case BaseExceptionGroup():
            explained = [explain(each) for each in error.exceptions]
            return [line for lines in explained for line in lines] if all(explained) else []
        case ConfigurationError(problems=(problem,)):
            return [problem]
        case ConfigurationError():
            return ["this node's settings need attention:", *error.problems]
        case ServerUnfit():
            return [str(error), "a node allows it by FEDERATION_ALLOW_EVICTION=true"]
        case ForeignQueue():
            return [str(error)]
        case StorageError():
            return [str(error), "where a queue in a database lacks tables, `federation upgrade` makes them"]
        case SQLAlchemyError():
            return [_database_problem(error)]
        case ModuleNotFoundError() if extra := extra_with(error):
            return [f"this needs more packages: {install(extra)}"]
        case _:
            known = _kind(error) not in (
                Kind.BUG,
                Kind.MISSING_PACKAGE,
            )  # another missing module is a bug
            return [str(error) or "something did not answer in time"] if known else []


def _kind(error: BaseException) -> Kind:
    """Return the kind of an error that `explain` explains; for an exception group, that of its first."""
    from sqlalchemy.exc import SQLAlchemyError

    from db.errors import is_outage
    from db.host import HostTablesError
    from db.poolers import LentSessionsError
    from db.url import DatabaseUrlError
    from federation.analytics.errors import AnalyticsError
    from federation.base.errors import ConfigurationError, NoNodeHere, Unreachable
    from federation.protocol.errors import UrlError
    from workers import StorageUnavailable, WorkersError

    if _is_about_arguments(error):
        return Kind.USAGE
    if isinstance(error, BaseExceptionGroup):
        return _kind(error.exceptions[0])
    if isinstance(error, SQLAlchemyError) and is_outage(error):
        return Kind.UNREACHABLE
    kinds: list[tuple[tuple[type[BaseException], ...], Kind]] = [
        ((LentSessionsError,), Kind.REFUSED),
        ((NoNodeHere,), Kind.NO_NODE_HERE),
        ((ConfigurationError,), Kind.SETTINGS),
        ((Unreachable, StorageUnavailable), Kind.UNREACHABLE),
        ((UrlError, DatabaseUrlError), Kind.USAGE),
        ((ModuleNotFoundError,), Kind.MISSING_PACKAGE),
        ((HostTablesError, WorkersError, *_alembics(), AnalyticsError, OSError, SQLAlchemyError), Kind.REFUSED),
    ]
    return next((kind for types, kind in kinds if isinstance(error, types)), Kind.BUG)


def _is_about_arguments(error: BaseException) -> bool:
    """Tell whether no driver could encode what was typed; only names of files may be bytes of any kind."""
    from sqlalchemy.exc import DBAPIError

    cause = error.__cause__ if isinstance(error, DBAPIError) else error
    refused = isinstance(cause, UnicodeEncodeError) or isinstance(getattr(cause, "__cause__", None), UnicodeEncodeError)
    return refused and not _Expected.are_texts


def _alembics() -> tuple[type[BaseException], ...]:
    """Return Alembic's error if it was imported: the import takes long, and nothing else raises it."""
    alembic = sys.modules.get("alembic.util")
    return () if alembic is None else (alembic.CommandError,)


def _database_problem(error: SQLAlchemyError) -> str:
    """Describe the error by its type, or the driver's own if it has one. Its text may quote a URL or a row."""
    from db.errors import is_outage, local_cause

    if cause := local_cause(error):
        return f"the database cannot be used: {cause}"
    kind = type(error.__cause__ or error).__name__
    if is_outage(error):
        return f"the database cannot be used: {kind}; is DATABASE_URL right, and the server up?"
    return f"the database answers, but refuses: {kind}; `federation doctor` looks at its tables"
