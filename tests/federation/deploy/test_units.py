"""The systemd units: hardened, judged by systemd's own tool, and in step with commands and settings."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from db.engines import POSTGRES_CONNECTIONS
from federation.base.settings.settings import Settings
from federation.base.settings.types import parse_duration
from federation.runtime.nodes import descriptors
from tests.federation.deploy.commands import refusal, unknown_variables
from tests.federation.deploy.places import DEPLOY, SYSTEMD, approve, tool
from tests.federation.deploy.test_containers import RESERVED

UNITS = sorted(path.name for path in SYSTEMD.iterdir())
BINARY = "/opt/federation/bin/federation"
MOST_EXPOSED = 20
"""Of 100, as `systemd-analyze security` counts: an ordinary service has 96, these have 14."""
OWN = frozenset({"Environment", "ExecReload", "ExecStart", "OOMPolicy"})
"""What one unit has differently from the others."""


def directives(unit: str) -> dict[str, list[str]]:
    """All values of each directive, in order."""
    found: dict[str, list[str]] = {}
    for line in (SYSTEMD / unit).read_text().splitlines():
        if "=" in line and not line.startswith("#"):
            name, _, value = line.partition("=")
            found.setdefault(name, []).append(value)
    return found


def environment(unit: str) -> dict[str, str]:
    pairs = (pair for value in directives(unit)["Environment"] for pair in shlex.split(value))
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def settings(unit: str) -> Settings:
    return Settings.from_values(environment(unit))


def test_there_are_three() -> None:
    """One for each side of a node, and one to look at both."""
    assert UNITS == ["federation-dashboard.service", "federation-node.service", "federation-worker.service"]


def test_commands_are_judged_by_the_real_parser() -> None:
    """It takes what there is, and nothing else."""
    for wrong in (["work"], ["workers", "go"], ["workers", "run", "--port", "1"], ["run", "--metrics-port"]):
        assert refusal(wrong) is not None, wrong


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_runs_a_command_with_settings_that_exist(unit: str) -> None:
    """And with values that the settings take."""
    (command,) = directives(unit)["ExecStart"]
    program, *arguments = shlex.split(command)
    assert program == BINARY
    assert refusal(arguments) is None
    assert unknown_variables(environment(unit)) == set()
    settings(unit)


def test_the_manual_runs_commands_that_exist() -> None:
    """Those for an operator with units, and those for one with containers."""
    text = (DEPLOY / "README.md").read_text()
    commands = re.findall(rf"(?:{BINARY}|federation-delivery|exec worker federation) ([a-z].*)", text)
    assert [*filter(None, map(refusal, map(shlex.split, commands)))] == []
    assert len(commands) == 5


@pytest.mark.parametrize("unit", UNITS)
def test_a_stop_is_given_more_time_than_it_takes(unit: str) -> None:
    """The grace, and as long again for what is released after it; a process that is killed releases nothing."""
    told = directives(unit)
    assert told["KillSignal"] == ["SIGTERM"]
    assert "FEDERATION_GRACE" in environment(unit)
    assert parse_duration(told["TimeoutStopSec"][0]) >= 2 * settings(unit).federation_grace


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_may_open_as_many_files_as_a_node_needs(unit: str) -> None:
    """With the defaults four times over."""
    assert int(directives(unit)["LimitNOFILE"][0]) >= 4 * descriptors(settings(unit)).needed


def test_all_units_are_equally_hard() -> None:
    """They differ in what they run, and in nothing else."""
    one, *others = ({k: v for k, v in directives(unit).items() if k not in OWN | {"Description"}} for unit in UNITS)
    assert others == [one, one]
    for name, value in {
        "ProtectSystem": "strict",
        "NoNewPrivileges": "yes",
        "PrivateTmp": "yes",
        "StateDirectory": "federation",
        "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
        "MemoryMax": "1G",
    }.items():
        assert one[name] == [value]


def test_the_supervisor_of_the_workers_is_told_and_left_alone() -> None:
    """A reload replaces its processes; the kernel's killing one of them, and a stop of all, are the supervisor's."""
    worker = directives("federation-worker.service")
    assert "--processes" in worker["ExecStart"][0]
    assert worker["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert (worker["OOMPolicy"], worker["KillMode"]) == (["continue"], ["mixed"])


def test_the_node_takes_a_proxy_on_its_machine_for_one() -> None:
    """Else all that the proxy forwards would come from 127.0.0.1; at the node's own port nobody reads metrics."""
    node = settings("federation-node.service")
    assert {str(each) for each in node.federation_trusted_proxies} == {"127.0.0.1/32", "::1/128"}
    assert not node.federation_metrics_clients


def test_postgres_admits_what_the_units_may_open() -> None:
    """With one process more while the worker's are replaced, and a command of the operator."""
    (command,) = directives("federation-worker.service")["ExecStart"]
    processes = int(command.split("--processes ")[1].split()[0]) + 1
    (admitted,) = re.findall(r"max_connections = (\d+)", (DEPLOY / "README.md").read_text())
    needed = (processes + len(UNITS) - 1 + 1) * POSTGRES_CONNECTIONS
    assert needed + RESERVED <= int(admitted)


def test_systemd_takes_the_units(tmp_path: Path) -> None:
    """It knows every directive and value, and finds them little exposed."""
    analyze = tool("systemd-analyze", package="systemd")
    for unit in UNITS:
        there = (SYSTEMD / unit).read_text().replace(BINARY, "/bin/true")  # it looks whether the program is there
        (tmp_path / unit).write_text(there)
        assert approve(analyze, "verify", unit, cwd=tmp_path) == ""
        approve(analyze, "security", "--offline=yes", f"--threshold={MOST_EXPOSED}", unit, cwd=tmp_path)
