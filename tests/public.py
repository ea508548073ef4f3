"""What is public: names that others import, type, parse, alert on or read from the database.

    python -m tests.public > docs/reference/public.md

makes the page anew. A line that is gone from it is a promise that is broken: see docs/reference/stability.md.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib import import_module
from typing import Final

from click import Command, Parameter
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from pydantic_core import PydanticUndefined
from typer.main import get_command

from db import FederationTable, HostTable
from federation.analytics.cli import make_parser
from federation.base.settings.settings import Settings
from federation.cli.app import app
from federation.cli.problems import INTERRUPTED, NOT_FOUND, USAGE_ERROR, Kind
from tests.federation.test_documented_names import all_events, metric_names
from workers import Queue
from workers.command.main import make_parser as workers_parser
from workers.dashboard.__main__ import ACCOUNTS_VARIABLE
from workers.dashboard.__main__ import make_parser as dashboard_parser
from workers.middlewares.prometheus import JobCounters, PrometheusMetrics, QueueGauges
from workers.storage.memory import MemoryStorage
from workers.supervisor import overview
from workers.testing.__main__ import make_parser as testing_parser

MODULES: Final = (
    *("federation", "federation.activitypub", "federation.sync", "federation.sync.activitypub", "federation.testing"),
    *("workers", "workers.storage", "workers.sync", "workers.testing"),
)
"""Modules whose every exported name is public."""
MORE: Final[Mapping[str, tuple[str, ...]]] = {
    "db.url": ("parse_url",),
    "federation.tasks": ("enqueue_task", "task"),
    "workers.clock": ("ManualClock",),
    "workers.dashboard.access": ("Access",),
    "workers.dashboard.application": ("queue_site",),
    "workers.flows": ("FlowJob",),
    "workers.jobs": ("ChildFailure", "DROP"),
    "workers.kv": ("ConditionalKvStore", "KvStore", "MemoryKvStore", "writes_conditionally"),
    "workers.kv.redis": ("RedisKvStore",),
    "workers.kv.sql": ("SqlKvStore",),
    "workers.limits": ("LimitKey",),
    "workers.middlewares": (
        *("AttemptFilter", "JobMeter", "Metrics", "Outcome", "log_attempts", "measure_attempts", "outcome_of"),
    ),
    "workers.middlewares.opentelemetry": ("JobInstruments", "trace_attempts"),
    "workers.middlewares.prometheus": ("JobCounters", "PrometheusMetrics", "QueueGauges"),
    "workers.specs": ("content_id",),
    "workers.storage.bull": ("BullJob", "BullStorage"),
    "workers.storage.bullmq": ("BullMQStorage", "as_processor"),
    "workers.storage.file": ("FileStorage",),
    "workers.storage.memory": ("MemorySpace", "MemoryStorage"),
    "workers.storage.redis": ("RedisStorage",),
    "workers.storage.sql": ("SqlStorage",),
    "workers.worker.events": ("WorkerEvent", "WorkerEventKind"),
}
"""Names that the manual has applications import from other modules, which have more."""
PLUGINS: Final = ("federation.testing.pytest_plugin", "workers.pytest_plugin")
EXITS: Final = (
    "0 all went well",
    f"{NOT_FOUND} a problem was found, or there is nothing to do it to",
    f"{USAGE_ERROR} wrong usage or settings, or what is needed does not answer",
    f"{INTERRUPTED} Ctrl-C",
)
HEAD: Final = """# What is public

What is listed here is promised to stay: see [Versions](stability.md). Everything else may change in any release. Of a
class that is listed, the methods and attributes whose names do not begin with `_` are public, too. The page is made
from the code, and a test compares the two.

[Python](#python) · [Fixtures of pytest](#fixtures-of-pytest) · [Settings](#settings) · [Commands](#commands) · [Exit
statuses](#exit-statuses) · [Kinds of errors](#kinds-of-errors) · [Metrics](#metrics) · [Log events](#log-events) ·
[Tables](#tables)

What the commands print with `--json` is in [its own page](../cli-json.md). The calls and answers of the dashboard's
API, all below `/api/v1`, are described at `/api/v1/openapi.json`.
"""


def page() -> str:
    """The page, as it is to be."""
    parts = {
        "Python": python(),
        "Fixtures of pytest": fixtures(),
        "Settings": settings(),
        "Commands": commands(),
        "Exit statuses": EXITS,
        "Kinds of errors": sorted(Kind),
        "Metrics": sorted(metric_names() | queue_metrics()),
        "Log events": sorted(all_events()),
        "Tables": tables(),
    }
    shown = "\n".join(f"\n## {title}\n\n```text\n" + "\n".join(lines) + "\n```" for title, lines in parts.items())
    return f"{HEAD}{shown}\n"


def python() -> Iterator[str]:
    """Each name that is public of a module, with its parameters if it can be called."""
    exported = {module: import_module(module).__all__ for module in MODULES}
    for module, names in (exported | MORE).items():
        there = import_module(module)
        for name in sorted(names):
            value = getattr(there, name)
            is_enum = isinstance(value, type) and issubclass(value, Enum)
            yield f"{module}.{name}" + (f": {' '.join(each.name for each in value)}" if is_enum else parameters(value))


def fixtures() -> Iterator[str]:
    """Each fixture of our plugins, below its plugin."""
    for plugin in PLUGINS:
        there = vars(import_module(plugin))
        for name in sorted(there):
            if "pytest_fixture" in repr(there[name]):
                yield f"{plugin}: {name}"


def queue_metrics() -> set[str]:
    """The names of the metrics of `workers`, as Prometheus knows them."""
    registry = CollectorRegistry()
    PrometheusMetrics(registry)
    JobCounters(registry)
    QueueGauges(Queue(MemoryStorage(queue="q")), registry=registry)
    names = {each.name + ("_total" if each.type == "counter" else "") for each in registry.collect()}
    return names | set(re.findall(r"# TYPE (\w+)", inspect.getsource(overview)))


def parameters(value: object) -> str:
    """Their names, and a `=` after those that may be left out; nothing for what has none, or takes what any does."""
    if not callable(value) or getattr(value, "_is_protocol", False):
        return ""
    if isinstance(value, type) and issubclass(value, BaseException):
        return ""
    try:
        found = inspect.signature(value).parameters.values()
    except ValueError:
        return ""
    marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    shown, before = [], None
    for each in found:
        if each.kind is each.KEYWORD_ONLY and before not in (each.KEYWORD_ONLY, each.VAR_POSITIONAL):
            shown.append("*")
        optional = "=" if each.default is not each.empty else ""
        shown.append(f"{marks.get(each.kind, '')}{each.name}{optional}")
        before = each.kind
    return f"({', '.join(shown)})"


def settings() -> Iterator[str]:
    for name, field in sorted(Settings.model_fields.items()):
        default = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
        has_one = default is not PydanticUndefined and default is not None
        yield f"{name.upper()} = {default}" if has_one else name.upper()
    yield f"{ACCOUNTS_VARIABLE} (of python -m workers.dashboard)"


def commands() -> Iterator[str]:
    """Each command with its arguments, and its options by their longest names."""

    def walk(command: Command, *path: str) -> Iterator[str]:
        for name, each in sorted(getattr(command, "commands", {}).items()):
            yield from walk(each, *path, name)
        if not hasattr(command, "commands") and path != ("analytics",):
            yield " ".join(("federation", *path, *map(_typed, command.params)))

    of_analytics = _parsed(make_parser(), "federation", "analytics")
    yield from sorted([*walk(get_command(app)), *of_analytics])
    yield from _parsed(workers_parser(), "python -m workers")
    yield from _parsed(dashboard_parser(), "python -m workers.dashboard")
    yield from _parsed(testing_parser(), "python -m workers.testing")


def _parsed(parser: argparse.ArgumentParser, *path: str) -> Iterator[str]:
    """The same of a command that argparse reads, which has no other way to be asked than what it keeps for itself."""
    shown, below = [], dict[str, argparse.ArgumentParser]()
    for each in parser._actions:
        if isinstance(each, argparse._SubParsersAction):
            below = each.choices
        elif "--help" not in each.option_strings:
            shown.append(max(each.option_strings, key=len, default=str(each.metavar or each.dest).upper()))
    for name, one in sorted(below.items()):
        yield from _parsed(one, *path, name)
    if not below:
        yield " ".join((*path, *map(str, shown)))


def _typed(parameter: Parameter) -> str:
    is_option = parameter.param_type_name == "option"
    return max(parameter.opts, key=len) if is_option else (parameter.name or "").upper()


def tables() -> Iterator[str]:
    """Each column that is ours, and each of the host's that we read."""
    for base in (FederationTable, HostTable):
        for table in base.metadata.sorted_tables:
            for column in table.columns:
                yield f"{table.name}.{column.name} {column.type}{' null' if column.nullable else ''}"


if __name__ == "__main__":
    print(page(), end="")
