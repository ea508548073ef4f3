"""`federation analytics …`. Spark is imported when such a command runs, never before."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import ExitStack, contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

from federation.analytics.errors import AnalyticsError
from federation.base.settings.directories import scheme_of
from federation.base.settings.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from pyspark.sql import SparkSession

    from federation.analytics.data.export import Export
    from federation.analytics.data.snapshots import Place
    from federation.analytics.data.store_urls import StoreUrl

EXPORTS: Final = "exports"
"""The directory in OUT to which a run exports the database."""

FEWEST_DAYS: Final = 30

_DATABASE: Final = "postgresql://… or sqlite:///… (default: DATABASE_URL, which keeps a password out of `ps`)"


def main(arguments: Sequence[str]) -> None:
    """Run one of the commands.

    Raises:
        AnalyticsError, ConfigurationError, DatabaseUrlError: the request is wrong, or cannot be met; the message says
            why.
    """
    options = make_parser().parse_args(arguments)
    with _ahead(options):
        options.command(options)


class _Parser(argparse.ArgumentParser):
    """Leaves the reporting of errors to the `federation` command."""

    def error(self, message: str) -> NoReturn:
        raise AnalyticsError(f"{message}; see `{self.prog} --help`")


def make_parser() -> argparse.ArgumentParser:
    """Make the parser of the commands; it raises `AnalyticsError` for arguments that they do not accept."""
    made = _Parser(
        prog="federation analytics", description="Scorecards and reports of the servers we know, with Spark."
    )
    parsers = made.add_subparsers(required=True, metavar="COMMAND")
    common, reading = _common_options(), _reading_options()

    run = parsers.add_parser(
        "run",
        help="compute everything and write the report",
        description="Exports the database to OUT/exports, or reads DIR; computes; writes results and OUT/report.html.",
        parents=[reading, common],
    )
    run.add_argument("--input", type=_place, metavar="DIR", help="read these exports, and export nothing")
    run.add_argument("--database", metavar="URL", help=f"{_DATABASE}; with --input: only for the results, if at all")
    run.set_defaults(command=_run)

    told = "write the database's tables as Parquet, attempts by UTC day"
    export = parsers.add_parser("export", help=told, parents=[reading, common])
    export.add_argument("--database", metavar="URL", help=_DATABASE)
    export.set_defaults(command=_export)

    forget = parsers.add_parser(
        "forget",
        help="remove a server from exports, results and report",
        description="Removes a server from all of OUT; `federation servers forget` removes it from the database.",
        parents=[common],
    )
    forget.add_argument("url", metavar="URL", help="the server, or its host name")
    forget.set_defaults(command=_forget)

    told = "write the report again, from results that are there"
    report = parsers.add_parser("report", help=told, parents=[common])
    report.add_argument("--as-of", type=_day, metavar="DAY", help="the last day of the run (default: the latest)")
    report.set_defaults(command=_report)
    return made


def _common_options() -> _Parser:
    options = _Parser(add_help=False)
    place = "directory of exports, results and report, made if need be; or s3://…, gs://…, abfs://…, hdfs://…"
    options.add_argument("--out", type=_place, required=True, metavar="OUT", help=place)
    options.add_argument("--json", action="store_true", help="print a summary as JSON")
    master = "Spark's master (default: spark-submit's, else this machine with all its cores)"
    options.add_argument("--master", help=master)
    return options


def _reading_options() -> _Parser:
    """Return the options of what may read the database."""
    options = _Parser(add_help=False)
    options.add_argument("--since", type=_day, metavar="DAY", help="first UTC day, as 2025-01-31, today or yesterday")
    options.add_argument("--until", type=_day, metavar="DAY", help="the UTC day after the last")
    keep = f"remove exported attempts of days that ended longer ago, at least {FEWEST_DAYS} (default: keep all)"
    options.add_argument("--keep-days", type=_days, metavar="N", help=keep)
    partitions = "how many tasks share the read of a large table (default: by its size)"
    options.add_argument("--partitions", type=_count, metavar="N", help=partitions)
    return options


def tell(text: str) -> None:
    """Show progress, if somebody watches a terminal."""
    if sys.stderr.isatty():
        print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)  # noqa: T201 - a command's progress


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is no number from 1")
    return int(text)


def _place(text: str) -> Path | StoreUrl:
    if not scheme_of(text):
        return Path(text)
    from federation.analytics.data.store_urls import parse_store_url

    try:
        return parse_store_url(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _days(text: str) -> int:
    if not text.isdecimal() or int(text) < FEWEST_DAYS:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days from {FEWEST_DAYS}, which scorecards look at")
    return int(text)


def _day(text: str) -> date:
    today = datetime.now(UTC).date()
    named = {"today": today, "yesterday": today - timedelta(days=1), "tomorrow": today + timedelta(days=1)}
    try:
        return named.get(text) or date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no day as 2025-01-31, today or yesterday") from None


def _run(options: argparse.Namespace) -> None:
    from federation.analytics import pipeline
    from federation.analytics.data.inputs import require_exports
    from federation.analytics.data.publish import require_publishable
    from federation.analytics.data.snapshots import open_for_writing, open_place

    _check(options)
    if options.input is not None:
        require_exports(open_place(options.input))
    out = open_for_writing(options.out)
    database = options.database if options.input else _database(options)
    exports, read_at = open_place(options.input or options.out / EXPORTS), None
    purged: tuple[date, ...] = ()
    work = pipeline.work_of(exports, options.since, options.until)
    with _session(options, database, ready=require_publishable, work=work) as spark:
        if options.input is None and database is not None:
            read_at = datetime.now(UTC)
            purged = _export_to(options, exports, spark, database).kept
        window = pipeline.window_of(exports, options.since, options.until)
        summary = pipeline.run(
            spark, exports, out, window, database=database, read_at=read_at, purged=purged, told=tell
        )
    _print(options, summary, _lines(summary, options.out))


def _export(options: argparse.Namespace) -> None:
    from federation.analytics.data.snapshots import open_for_writing

    _check(options)
    exports = open_for_writing(options.out)
    database = _database(options)
    with _session(options, database) as spark:
        done = _export_to(options, exports, spark, database)
    _print(options, _counted(done), _export_lines(done, options.out))


def _export_to(options: argparse.Namespace, exports: Place, spark: SparkSession, database: str) -> Export:
    from federation.analytics.data.export import export
    from federation.analytics.data.source import SourceTables
    from federation.analytics.data.stored_exports import export_to_store

    tables = SourceTables(spark=spark, url=database, partitions=options.partitions)
    asked = {"since": options.since, "until": options.until, "keep_days": options.keep_days, "told": tell}
    if isinstance(exports, Path):
        return export(tables, exports, **asked)
    return export_to_store(tables, spark, exports, **asked)


def _report(options: argparse.Namespace) -> None:
    from federation.analytics import pipeline
    from federation.analytics.data.snapshots import commit, open_for_writing

    out = open_for_writing(options.out)
    as_of = options.as_of or pipeline.latest(out)
    with _session(options, None) as spark:
        summary = pipeline.report(spark, out, as_of, told=tell)
    commit(out)
    _print(options, summary, _lines(summary, options.out))


def _forget(options: argparse.Namespace) -> None:
    from federation.analytics import pipeline
    from federation.analytics.data.forget import forget
    from federation.analytics.data.snapshots import commit, open_for_writing
    from federation.protocol.errors import UrlError
    from federation.protocol.urls import canonical_origin

    in_directory = isinstance(options.out, Path)
    if in_directory and not options.out.is_dir():
        raise AnalyticsError(f"there is no directory {options.out}")
    try:
        url = canonical_origin(options.url if "://" in options.url else f"https://{options.url}")
    except UrlError as error:
        raise AnalyticsError(str(error)) from None
    out = open_for_writing(options.out)
    done = [forget(out, url)]
    if not in_directory:
        done.append(forget(open_for_writing(options.out / EXPORTS), url))
    if pipeline.has_results(out):
        with _session(options, None) as spark:
            pipeline.report(spark, out, None, told=tell)
        commit(out)
    files, rows = sum(each.files for each in done), sum(each.rows for each in done)
    lines = [f"{rows:,} rows about {url} are removed, from {files:,} files in {options.out}"]
    if not in_directory:
        lines.append(
            "the files before are there for a day, for those who read them; the next run after that removes them"
        )
    _print(options, {"url": url, "files": files, "rows": rows}, lines)


@contextmanager
def _ahead(options: argparse.Namespace) -> Iterator[None]:
    """Open Spark's session before anything is looked at, if Spark alone can look: that has Hadoop's client."""
    places = [
        place for place in (options.out, getattr(options, "input", None)) if place and not isinstance(place, Path)
    ]
    with ExitStack() as stack:
        if any(place.is_hadoops for place in places):
            from federation.analytics.session import MUCH

            if hasattr(options, "since"):
                _check(options)
            stack.enter_context(_session(options, None, work=MUCH))
        yield


def _check(options: argparse.Namespace) -> None:
    """Refuse arguments that are wrong in themselves, whatever they are used on."""
    tomorrow = datetime.now(UTC).date() + timedelta(days=1)
    if options.until and options.until > tomorrow:
        raise AnalyticsError(
            f"--until {options.until} is after tomorrow, {tomorrow}, the day after the last there can be"
        )
    if options.since and options.until and options.until <= options.since:
        raise AnalyticsError(
            f"--until {options.until} is not after --since {options.since}; it is the day after the last"
        )


def _database(options: argparse.Namespace) -> str:
    if options.database:
        return str(options.database)
    settings = Settings.load()
    settings.require_node_here()
    return settings.database_url.get_secret_value()


@contextmanager
def _session(
    options: argparse.Namespace,
    database: str | None,
    *,
    ready: Callable[[str], None] = lambda _: None,
    work: int = 0,
) -> Iterator[SparkSession]:
    """Open a Spark session.

    Problems that are found quickly are reported before the seconds that Spark takes to start.
    """
    from pyspark.sql import SparkSession

    from federation.analytics.data.database import check_database
    from federation.analytics.data.spark_files import root_of
    from federation.analytics.session import session

    if database is not None:
        check_database(database)
        ready(database)
    running = SparkSession.getActiveSession()
    if running is not None:  # see `_ahead`
        yield running
        return
    tell("starting Spark")
    with session(options.master, work=work) as spark:
        for place in (options.out, getattr(options, "input", None)):
            if place and not isinstance(place, Path):
                root_of(spark, place)
        yield spark


def _counted(done: Export) -> dict[str, object]:
    return {
        "since": done.window.since.isoformat(),
        "until": done.window.until.isoformat(),
        "attempts": {day.isoformat(): count for day, count in done.attempts.items()},
        "undated_attempts": done.undated,
        "kept_days": [day.isoformat() for day in done.kept],
        "filled_days": [day.isoformat() for day in done.filled],
        "removed_days": [day.isoformat() for day in done.removed],
        **done.snapshots,
    }


def _export_lines(done: Export, out: Path | StoreUrl) -> list[str]:
    total = sum(done.attempts.values())
    counts = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in done.snapshots.items())
    lines = [f"{total:,} attempts from {done.window.since} to {done.window.as_of}, {counts}: {out}"]
    if not total:
        lines.append("there were no attempts on these days")
    if done.undated:
        lines.append(f"{done.undated:,} attempts have an impossible time; each run sets them aside and counts them")
    lines += [f"{day}: the database lacks attempts that were exported before; these are kept" for day in done.kept]
    empty = sum(not done.attempts.get(day) for day in done.filled)
    if done.filled:
        lines.append(
            f"{len(done.filled)} days from {done.filled[0]} on had been left out, and are exported now; of {empty} of"
            " them the database has no attempts (none were made, or they are purged)"
        )
    if done.removed:
        lines.append(f"{len(done.removed)} days were too old to keep, or are to come, and their exports are removed")
    return lines


def _lines(summary: dict[str, object], out: Path | StoreUrl) -> list[str]:
    from federation.analytics.report.wording import plural

    totals, quarantine = summary["totals"], summary["quarantine"]
    assert isinstance(totals, dict)
    assert isinstance(quarantine, dict)
    counts = (
        f"{plural(totals['attempts'], 'attempt')} at {plural(totals['servers'], 'server')} as of {summary['as_of']}"
    )
    lines = [f"{counts}: {out / 'report.html'}"]
    if not totals["attempts"]:
        lines.append("there were no attempts on these days")
    if quarantine["rows"]:
        were = "row was" if quarantine["rows"] == 1 else "rows were"
        lines.append(f"{quarantine['rows']:,} {were} set aside; {out / 'quarantine'} says why")
    return lines


def _print(options: argparse.Namespace, summary: dict[str, object], lines: list[str]) -> None:
    """Print the result of a command on stdout."""
    print(json.dumps(summary, indent=2) if options.json else "\n".join(lines))  # noqa: T201 - the command's result
