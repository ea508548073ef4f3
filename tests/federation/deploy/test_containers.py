"""The compose file and the Dockerfile: in step with commands, settings, extras and each other, and read by compose."""

from __future__ import annotations

import ipaddress
import itertools
import re
import shutil
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import SecretStr

from db.engines import POSTGRES_CONNECTIONS
from federation.base.errors import ConfigurationError
from federation.base.settings.settings import Settings
from federation.base.settings.types import parse_duration
from federation.dashboard.serving import access_of
from federation.protocol.keys import generate_own_keys
from federation.runtime.nodes import descriptors
from tests.federation.deploy.commands import refusal, unknown_variables
from tests.federation.deploy.places import COMPOSE, DEPLOY, PROMETHEUS, ROOT, approve, tool
from tests.servers import free_port
from workers.dashboard.accounts import hash_password
from workers.version import GIVEN

OURS = ("upgrade", "worker", "node", "dashboard")
RESERVED = 3
"""Connections that PostgreSQL keeps for superusers."""
PASSWORD = re.compile(r"\$\{POSTGRES_PASSWORD:\?[^}]*\}")


@cache
def compose() -> dict[str, Any]:  # Any: YAML is what it is
    loaded: dict[str, Any] = yaml.safe_load((COMPOSE / "compose.yml").read_text())
    return loaded


def service(name: str) -> dict[str, Any]:
    found: dict[str, Any] = compose()["services"][name]
    return found


def settings(name: str) -> Settings:
    """What a service of ours runs with, once there is a password."""
    environment = {name: PASSWORD.sub("secret", value) for name, value in service(name)["environment"].items()}
    return Settings.from_values(environment)


def instructions() -> list[tuple[str, str]]:
    """Of the Dockerfile: name and arguments, continued lines as one."""
    text = re.sub(r"\\\n", "", (COMPOSE / "Dockerfile").read_text())
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return [(name, rest) for name, _, rest in (line.partition(" ") for line in lines)]


def arguments(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def test_the_services_are_a_whole_node() -> None:
    """Both sides, database, queues and monitoring."""
    assert compose()["services"].keys() == {*OURS, "postgres", "valkey", "prometheus"}


@pytest.mark.parametrize("name", OURS)
def test_a_service_runs_a_command_with_settings_that_exist(name: str) -> None:
    """And with values that the settings take."""
    assert refusal(service(name)["command"]) is None
    assert unknown_variables(service(name)["environment"]) == set()
    its = settings(name)
    assert its.database_url.get_secret_value().startswith("postgresql")
    assert its.redis_url is not None


@pytest.mark.parametrize("name", OURS)
def test_a_stop_is_given_more_time_than_it_takes(name: str) -> None:
    """The grace, and as long again for what is released after it."""
    assert parse_duration(service(name)["stop_grace_period"]) >= 2 * settings(name).federation_grace


@pytest.mark.parametrize("name", OURS)
def test_a_service_has_no_more_rights_than_it_needs(name: str) -> None:
    """And as many open files as a node needs."""
    its = service(name)
    assert its["read_only"]
    assert its["cap_drop"] == ["ALL"]
    assert its["security_opt"] == ["no-new-privileges:true"]
    assert its["ulimits"]["nofile"] >= 4 * descriptors(settings(name)).needed


def test_nothing_is_published_beyond_the_machine() -> None:
    """A TLS proxy there is before the node; database, queues and the workers' metrics are published nowhere."""
    published = {name: each["ports"] for name, each in compose()["services"].items() if "ports" in each}
    assert published == {
        "node": ["127.0.0.1:8000:8000"],
        "dashboard": ["127.0.0.1:8765:8765"],
        "prometheus": ["127.0.0.1:9090:9090"],
    }


def test_postgres_admits_what_the_services_may_open() -> None:
    """At the scale that the file invites to, with one process more for each worker that is replaced, and a command."""
    scale = re.search(r"--scale worker=(\d+)", (COMPOSE / "compose.yml").read_text())
    assert scale is not None
    words = service("worker")["command"]
    processes = int(scale[1]) * (int(words[words.index("--processes") + 1]) + 1)
    others = len({*OURS} - {"worker"})  # `upgrade` is a command
    (admitted,) = [word.partition("=")[2] for word in service("postgres")["command"] if "max_connections=" in word]
    assert (processes + others) * POSTGRES_CONNECTIONS + RESERVED <= int(admitted)


@pytest.mark.parametrize("name", ["worker", "node"])
def test_a_service_is_asked_how_it_is_at_a_port_that_it_serves(name: str) -> None:
    """By a program that the image has, which says no where nothing answers."""
    words = service(name)["command"]
    port = int(words[words.index("--metrics-port") + 1]) if name == "worker" else settings(name).federation_port
    kind, python, *arguments = service(name)["healthcheck"]["test"]
    assert (kind, python) == ("CMD", "python")
    assert f"'http://127.0.0.1:{port}/healthz'" in arguments[-1]
    asked = [sys.executable, arguments[0], arguments[1].replace(f":{port}/", f":{free_port()}/")]
    assert subprocess.run(asked, capture_output=True, check=False).returncode == 1


def test_the_dashboard_waits_for_an_account() -> None:
    """Without one it would not start, as it listens for others than itself; so nobody gets it unasked."""
    its = settings("dashboard")
    assert service("dashboard")["profiles"] == ["dashboard"]
    with pytest.raises(ConfigurationError, match="without an account"):
        access_of(its, allow_actions=False)
    account = f"anna:operator:{hash_password('a long password')}"
    access_of(its.model_copy(update={"federation_dashboard_accounts": SecretStr(account)}), allow_actions=False)


def test_prometheus_alone_may_read_the_nodes_metrics() -> None:
    """Its address is its own, and the network's gateway, who stands for all visitors, is taken for a proxy."""
    (network,) = compose()["networks"]["default"]["ipam"]["config"]
    address = service("prometheus")["networks"]["default"]["ipv4_address"]
    node = settings("node")
    assert [str(each) for each in node.federation_metrics_clients] == [f"{address}/32"]
    assert [str(each) for each in node.federation_trusted_proxies] == [f"{network['gateway']}/32"]
    assert ipaddress.ip_address(address) in ipaddress.ip_network(network["subnet"])
    assert ipaddress.ip_address(address) not in ipaddress.ip_network(network["ip_range"])


def test_prometheus_scrapes_the_ports_that_are_served() -> None:
    """Every process of the node, under one name."""
    (job,) = yaml.safe_load((PROMETHEUS / "prometheus.compose.yml").read_text())["scrape_configs"]
    targets = {(*each["names"], each["port"]) for each in job["dns_sd_configs"]}
    metrics_port = int(service("worker")["command"][-1])
    assert targets == {("worker", metrics_port), ("node", settings("node").federation_port)}
    assert settings("worker").federation_metrics_bind == settings("node").federation_bind == "0.0.0.0"


def test_mounted_files_are_there() -> None:
    """Docker would make folders in their place."""
    mounts = [mount.split(":")[0] for mount in service("prometheus")["volumes"] if mount.startswith(".")]
    assert len(mounts) == 2
    assert all((COMPOSE / mount).is_file() for mount in mounts)
    build = service("node")["build"]
    assert (COMPOSE / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).is_file()


def test_the_image_runs_federation() -> None:
    """Its own command works, its variables are known, and a stop reaches it."""
    (entry,), (command,) = arguments("ENTRYPOINT"), arguments("CMD")
    assert entry == '["federation"]'
    assert refusal(re.findall(r'"([^"]*)"', command)) is None
    names = {pair.partition("=")[0] for rest in arguments("ENV") for pair in rest.split()}
    assert unknown_variables(names) == set()
    assert arguments("STOPSIGNAL") == ["SIGTERM"]
    assert arguments("USER")[-1] != "root"


def test_the_image_is_made_of_what_there_is() -> None:
    """What is copied is there, let through by the ignore file, and has every package."""
    sources = {
        word.rstrip("/") for rest in arguments("COPY") if not rest.startswith("--from") for word in rest.split()[:-1]
    }
    assert all((ROOT / source).exists() for source in sources)
    let_through = {
        line[1:] for line in (COMPOSE / "Dockerfile.dockerignore").read_text().splitlines() if line[0] == "!"
    }
    assert let_through == sources
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert sources >= set(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"])


def test_the_image_is_made_of_pinned_files_alone() -> None:
    """Each package that its extras bring is there in the tested version, with the hashes of its files."""
    lines = (COMPOSE / "constraints-hashed.txt").read_text().splitlines()
    pinned = dict(line.split()[0].split("==") for line in lines if re.match("[a-z]", line))
    for line, after in itertools.pairwise(lines):
        assert not re.match("[a-z]", line) or after.startswith("    --hash=sha256:"), line
    tested = {
        canonicalize_name(name): version
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
        for name, version in [line.split("==")]
    }
    assert {name: tested.get(name, version) for name, version in pinned.items()} == pinned
    extras = set(re.findall(r"--extra (\w+)", lines[1]))
    assert extras == {"bullmq", "dashboard", "metrics", "node", "postgres"}
    assert {"hatchling", *_brought(extras)} <= pinned.keys()
    (install, build) = (part for part in " ".join(arguments("RUN")).split("&&") if "pip install" in part)
    assert "--require-hashes --requirement constraints-hashed.txt" in install
    assert "--no-deps --no-build-isolation ." in build


def _brought(extras: set[str]) -> set[str]:
    """Name all that the installed distribution needs with these extras, here."""
    found: set[str] = set()
    wanted = [("federation-delivery", extras)]
    while wanted:
        name, asked = wanted.pop()
        for each in map(Requirement, requires(name) or ()):
            named = canonicalize_name(each.name)
            if any(each.marker is None or each.marker.evaluate({"extra": extra}) for extra in asked or {""}):
                if named not in found:
                    wanted.append((named, each.extras))
                found.add(named)
    return found


def test_the_image_has_the_version_of_its_commit() -> None:
    """The build is told: it sees no history. As the manual has it, and the file itself, from the file that knows."""
    (argument,) = arguments("ARG")
    name = argument.rstrip("=")
    assert f'{GIVEN}="${name}"' in " ".join(arguments("RUN"))
    told = f'--build-arg {name}="$(python3 workers/version.py)" .'
    assert told in (DEPLOY / "README.md").read_text()
    assert told in (COMPOSE / "Dockerfile").read_text()


def test_compose_takes_the_file(tmp_path: Path) -> None:
    """With a `.env` as the manual has it made; an old docker-compose, too, but for the project's name."""
    command, is_old = compose_command()
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    folder = tmp_path / "deploy" / "compose"
    keys = "".join(f'{name}="{value}"\n' for name, value in generate_own_keys().to_env().items())
    (folder / ".env").write_text(f"{keys}BETTER_AUTH_URL=https://node.example\nPOSTGRES_PASSWORD=0123abcd\n")
    if is_old:
        text = (folder / "compose.yml").read_text()
        (folder / "compose.yml").write_text(re.sub(r"^name:.*\n", "", text, flags=re.MULTILINE))
    shown = yaml.safe_load(approve(*command, "-f", "compose.yml", "config", cwd=folder))
    assert shown["services"].keys() == compose()["services"].keys()
    for name in OURS:
        environment = shown["services"][name]["environment"]
        assert unknown_variables(environment) == {"POSTGRES_PASSWORD"}
        Settings.from_values(environment).require_identity()


def compose_command() -> tuple[list[str], bool]:
    """Docker's own compose where that is, else the older program, which knows no name of a project."""
    if docker := shutil.which("docker"):
        there = subprocess.run([docker, "compose", "version"], capture_output=True, check=False)
        if there.returncode == 0:
            return [docker, "compose"], False
    return [tool("docker-compose", package="docker-compose")], True
