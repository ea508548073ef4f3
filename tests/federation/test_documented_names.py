"""What operators search logs and write alerts for is in the manual, and what the manual names exists."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import federation
import workers
from db import DeliveryState, HoldReason, HostTable
from db.host import UNUSED
from federation.base.settings.settings import Settings
from federation.codes import CODES
from federation.manual import TRANSITIONS, failures, states
from federation.monitoring.prometheus import ProcessMetrics
from federation.runtime.workers import log_event
from tests.federation.test_run import ROOT
from workers import supervisor
from workers.worker.events import WorkerEvent, WorkerEventKind

LEVELS = {"debug", "info", "warning", "error", "exception", "critical"}


def page(name: str) -> str:
    """The text of a page of the manual."""
    return (ROOT / "docs" / f"{name}.md").read_text()


def first_column(text: str) -> set[str]:
    """Every name in the first cells of the tables in a text."""
    cells = re.findall(r"^\| (`[^|]*?`) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([a-z0-9_]+)", cell)}


def logging_calls(tree: ast.Module) -> Iterator[ast.Call]:
    """Calls of `log.info(...)`, of `getattr(log, ...)(...)`, and of a `level` that is one of its methods."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Attribute(value=ast.Name(id="log"), attr=attr) if attr in LEVELS:
                yield node
            case ast.Name(id="level"):
                yield node
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id="log"), *_]):
                yield node


def events_of(call: ast.Call, tree: ast.Module) -> set[str]:
    """The names that a call may log under; those of workers' events are found by calling."""
    match call.args[0]:
        case ast.Constant(value=str(name)):
            return {name}
        case ast.Name(id=variable):
            assigned = [
                node.value
                for node in ast.walk(tree)
                if isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and node.targets[0].id == variable
            ]
            constants = [part.value for value in assigned for part in ast.walk(value) if isinstance(part, ast.Constant)]
            assert constants, f"where does {variable} come from?"
            return {value for value in constants if isinstance(value, str)}
        case ast.JoinedStr(values=[ast.Constant(value="worker_"), _]):
            return set()
        case other:
            raise AssertionError(f"an event's name should be a literal: {ast.unparse(other)}")


def logged_events() -> set[str]:
    """Every event name in the application's code."""
    events: set[str] = set()
    for path in Path(federation.__path__[0]).rglob("*.py"):
        tree = ast.parse(path.read_text(), str(path))
        for call in logging_calls(tree):
            events |= events_of(call, tree)
    return events


def supervisor_events() -> set[str]:
    """What the supervisor of several processes reports."""
    events: set[str] = set()
    for path in Path(supervisor.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(), str(path))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                match node.func.attr, node.args:
                    case "_report" | "_end", [_, ast.Constant(value=str(name)), *_]:
                        events.add(name)
    return events


def library_events() -> set[str]:
    """What `workers` logs under a name, by the standard library: the name is the first word of the message."""
    named = re.compile(r"[a-z]+(?:_[a-z]+)+(?= |$)")
    events: set[str] = set()
    for path in Path(workers.__path__[0]).rglob("*.py"):
        for call in logging_calls(ast.parse(path.read_text(), str(path))):
            match call.args[:1]:
                case [ast.Constant(value=str(text))] if found := named.match(text):
                    events.add(found[0])
    return events


def all_events() -> set[str]:
    """Whatever may be in the log under a name."""
    return logged_events() | supervisor_events() | worker_events() | library_events()


def worker_events() -> set[str]:
    """What workers' events are logged as."""
    with capture_logs() as logs:
        for kind in WorkerEventKind:
            log_event(WorkerEvent(kind=kind, queue="q", worker_id="w"))
    return {entry["event"] for entry in logs}


def test_every_log_event_is_in_the_manual() -> None:
    """And the manual lists no other."""
    in_code = all_events()
    assert len(in_code) > 50
    assert first_column(page("operate/log-events")) == in_code


def metric_names() -> set[str]:
    """The names of our own metrics as Prometheus knows them."""
    return {
        family.name + ("_total" if family.type == "counter" else "")
        for family in ProcessMetrics().registry.collect()
        if family.name.startswith("federation_")
    }


def test_every_metric_is_in_the_manual() -> None:
    """And the manual lists no other."""
    assert first_column(page("operate/metrics")) == metric_names()


@pytest.mark.parametrize(("name", "generated"), [("states", f"```mermaid\n{states()}\n```"), ("failures", failures())])
def test_what_becomes_of_deliveries_is_generated(name: str, generated: str) -> None:
    """The diagram of states and the table of failures are exactly what the code makes of its own tables."""
    shown = re.search(f"<!-- {name} -->\n(.*?)\n<!-- /{name} -->", page("understand/outcomes"), re.DOTALL)
    assert shown is not None
    assert shown[1] == generated


def test_the_states_of_the_manual_are_the_states_there_are() -> None:
    """Every state is entered and left, every code has a row that says what happened, every reason says until when."""
    assert {state for state, _ in TRANSITIONS} - {None} == set(DeliveryState) == set(TRANSITIONS.values()) - {None}
    text = page("understand/outcomes")
    assert first_column(text) >= {*DeliveryState, *HoldReason}
    told = {
        code for cell in re.findall(r"^\| (`[A-Z][^|]*) \|", text, re.M) for code in re.findall("`([A-Z_]+)`", cell)
    }
    assert told == set(CODES)


def test_the_plan_shows_every_floor() -> None:
    """The table of what lies where has the layers of the import contract, from the top to the bottom."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = [contract["layers"] for contract in contracts if contract.get("containers") == ["federation"]]
    _, _, plan = (ROOT / "federation" / "README.md").read_text().partition("## The plan\n")
    rows = re.findall(r"^\| (`.*?`) \|", plan.partition("\n## ")[0], re.MULTILINE)
    assert [re.findall(r"\w+", row) for row in rows] == [layer.split(" | ") for layer in layers]


def test_every_setting_is_in_the_manual() -> None:
    """And the manual lists no other."""
    listed = set(
        re.findall(r"`([A-Z][A-Z_]+)`", " ".join(re.findall(r"^\| (`[^|]*`) \|", page("operate/settings"), re.M)))
    )
    assert listed == {name.upper() for name in Settings.model_fields}


def test_the_manual_names_each_column_of_the_host_that_is_used() -> None:
    """And no other, so that a host knows what it has to keep."""
    cells = re.findall(r"^\| (`(?:user|posts|blocks)\.[^|]*) \|", page("embed/host-tables"), re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([a-z_]+\.[a-z_]+)`", cell)}
    tables = HostTable.metadata.tables.values()
    used = {f"{table.name}.{column.name}" for table in tables for column in table.columns} - UNUSED
    assert named == used


def test_the_manual_names_what_else_the_hosts_tables_have() -> None:
    """Keys and indexes that a host's later migrations find."""
    text = page("embed/host-tables")
    tables = HostTable.metadata.tables.values()
    names = [each.name for table in tables for each in (*table.foreign_key_constraints, *table.indexes)]
    assert [name for name in names if f"`{name}`" not in text] == []
