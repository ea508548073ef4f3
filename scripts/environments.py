"""The sets of extras that the documents tell readers to install, each of them tried in an environment of its own.

What an environment has is what it starts: every command, every storage, and every optional part, each of which answers.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeAlias

from processes import Broken, answer, command, free_port, quoted, running, stop

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDERS: Final = ("db", "docs", "federation", "scripts", "tests", "workers")
IMAGE: Final = "docs/deploy/compose/Dockerfile"
INSTALL: Final = re.compile(
    r"""pip3?\ install\ (?P<options>(?:-\S+\ (?:[^-'"\s.]\S*\ )?)*)
    (?P<quote>['"]?)(?:\.|\$\(echo\ dist/\*\.whl\))(?:\[(?P<extras>[a-z0-9,]+)\])?(?P=quote)(?=[`\s]|$)""",
    re.VERBOSE | re.MULTILINE,
)
"""Matches what installs the checkout, or a wheel built from it, with extras."""
EDITABLE: Final = "-e "
URL: Final = "https://node.example"
"""A URL that never belongs to anybody: the doctor cannot find the node there."""
OLDEST: Final = 11
"""The minor version of the oldest Python that is supported."""
INSTALL_SECONDS: Final = 300
SPARK_SECONDS: Final = 900

Extras: TypeAlias = frozenset[str]

READING: Final = (
    "--version",
    f"why {URL}",
    "workers list",
    "servers list",
    "deliveries list",
    "deliveries stats",
    "blacklist list",
    "blacklist export",
    "queues stats",
    "scheduler list",
    "db check",
    "keys show",
    "users list",
    "actions list",
    "upgrade",
)
"""Commands that a new node answers; of all the others the help is asked."""
PROGRAM: Final = """
import json, shlex, sys
from typer.main import get_command
from federation.cli.app import app, main
from workers.command import main as workers
from workers.storage import open_storage

def leaves(command, *path):
    for name, each in getattr(command, "commands", {}).items():
        yield from leaves(each, *path, name)
    if not hasattr(command, "commands"):
        yield path

helps = [[*path, "--help"] for path in leaves(get_command(app)) if path != ("analytics",)]  # that one loads Spark
commands, urls = map(json.loads, sys.argv[1:])
for url in urls:
    open_storage(url)
for words in [*map(shlex.split, commands), *helps]:
    try:
        main(words)
    except SystemExit as end:
        if end.code not in (None, 0, 1):
            sys.exit(f"`federation {shlex.join(words)}` ended with {end.code}")
workers(["--version"])
"""
STORAGES: Final = {
    "sqlite": "sqlite:///jobs.db",
    "postgres": "postgresql://127.0.0.1:1/jobs",
    "redis": "redis://127.0.0.1:1",
    "bullmq": "bullmq+redis://127.0.0.1:1",
}


@dataclass(frozen=True, slots=True)
class Environment:
    """Where the wheel is installed, with which extras, and a folder with a node."""

    bin: Path
    extras: Extras
    node: Path

    def federation(self, *arguments: str) -> list[str]:
        return [str(self.bin / "federation"), *arguments]

    def chosen(self) -> list[str]:
        return ["--python", str(self.bin / "python")]

    def python(self, *arguments: str) -> list[str]:
        return [str(self.bin / "python"), *arguments]


def documented(pages: Iterable[Path] | None = None) -> dict[Extras, str]:
    """Return every set of extras that a page says how to install, with the first such page.

    What is installed to be changed, not used, does not count.
    """
    found: dict[Extras, str] = {}
    for path in pages if pages is not None else installing():
        for match in INSTALL.finditer(path.read_text()):
            if match["options"] != EDITABLE:
                extras = frozenset((match["extras"] or "").split(",")) - {""}
                found.setdefault(extras, path.relative_to(ROOT).as_posix())
    return found


def installing() -> Iterator[Path]:
    """Yield the pages, and what makes the image."""
    yield from sorted(ROOT.glob("*.md"))
    yield from sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))
    yield ROOT / IMAGE


@dataclass(frozen=True, slots=True)
class Installer:
    """The uv that makes environments, in a second each: it links what it has had before."""

    path: str

    @classmethod
    def found(cls, folder: Path) -> Self:
        """Return the one on PATH, or else get one into an environment at `folder`."""
        if there := shutil.which("uv"):
            return cls(there)
        command([sys.executable, "-m", "venv", str(folder)], folder.parent, within=INSTALL_SECONDS)
        pip = (str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "uv")
        command(pip, folder.parent, _settings(), within=INSTALL_SECONDS)
        return cls(str(folder / "bin" / "uv"))

    def run(self, *arguments: str, within: float = INSTALL_SECONDS) -> None:
        command([self.path, *arguments], ROOT.parent, _settings(), within=within)


def _settings() -> dict[str, str]:
    """Return the environment of what installs: where it finds packages is set there, but not which Python is ours."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}


def pythons() -> dict[str, str]:
    """Return every Python that the wheel is for and that is found here, by its version: on PATH, or pyenv's."""
    names = [f"python3.{minor}" for minor in range(OLDEST, OLDEST + 20)]
    found = [sys.executable, *filter(None, map(shutil.which, names))]
    if root := os.environ.get("PYENV_ROOT"):
        found += sorted(str(path) for path in Path(root, "versions").glob("3.*/bin/python3"))
    told = {path: _version(path) for path in found}
    return {f"3.{minor}": path for path, minor in sorted(told.items(), key=lambda item: item[1]) if minor >= OLDEST}


def _version(python: str) -> int:
    """Return the minor version; 0 for one that does not answer, as pyenv's stand-ins for what is not installed."""
    words = [python, "-c", "import sys; print(sys.version_info.minor)"]
    told = subprocess.run(words, capture_output=True, text=True, check=False, env=_settings()).stdout
    return int(told) if told.strip().isdigit() else 0


def make(
    uv: Installer, wheel: Path, place: Path, extras: Extras, *, alone: bool = False, python: str = sys.executable
) -> Environment:
    """Install the wheel with these extras, and no others, below `place`; `alone` without anything that it needs.

    What is there is removed: one after the other, environments in the same place share what Python compiled.
    """
    shutil.rmtree(place, ignore_errors=True)
    environment = Environment(place / "venv" / "bin", extras, place / "node")
    environment.node.mkdir(parents=True)
    uv.run("venv", "--quiet", "--no-project", "--python", python, str(place / "venv"))
    wanted = f"{wheel}[{','.join(sorted(extras))}]" if extras else str(wheel)
    options = ["--no-deps"] if alone else ["--constraint", str(ROOT / "constraints.txt")]
    uv.run("pip", "install", "--quiet", *environment.chosen(), *options, wanted)
    if not alone:
        uv.run("pip", "check", "--quiet", *environment.chosen())
    return environment


def try_out(environment: Environment) -> list[str]:
    """Start all that the environment has the packages for, and return what that was."""
    command(environment.federation("init", "--url", URL), environment.node)
    urls = [url for extra, url in STORAGES.items() if extra in {*environment.extras, "sqlite"}]
    command(environment.python("-c", PROGRAM, json.dumps(READING), json.dumps(urls)), environment.node)
    done = ["every command"]
    for name, (needed, start) in PARTS.items():
        if needed <= environment.extras:
            start(environment)
            done.append(name)
    return done


def run_whole(environment: Environment) -> None:
    """Run a node with what its extras allow beside it."""
    node, metrics, pages = free_port(), free_port(), free_port()
    asked = {f"http://127.0.0.1:{node}/readyz": '"status": "ok"'}
    options: list[str] = []
    if "metrics" in environment.extras:
        options += ["--metrics-port", str(metrics)]
        asked[f"http://127.0.0.1:{metrics}/metrics"] = "federation_"
    if "dashboard" in environment.extras:
        options += ["--dashboard-port", str(pages)]
        asked[f"http://127.0.0.1:{pages}/"] = "<h1"
    ask(environment, environment.federation("run", *options), asked, FEDERATION_PORT=str(node))


def show_node(environment: Environment) -> None:
    port = free_port()
    ask(environment, environment.federation("dashboard", "--port", str(port)), {f"http://127.0.0.1:{port}/": "<h1"})


def show_queues(environment: Environment) -> None:
    port = free_port()
    shown = environment.python("-m", "workers.dashboard", f"sqlite:///{environment.node}/jobs.db", "--port", str(port))
    ask(environment, shown, {f"http://127.0.0.1:{port}/": "<h1"})


def compute(environment: Environment) -> None:
    """Write a report on the empty node."""
    if shutil.which("java") is None:
        raise Broken("there is no Java, which the analytics need")
    command(environment.federation("analytics", "run", "--out", "out"), environment.node, within=SPARK_SECONDS)
    if not (environment.node / "out" / "report.html").is_file():
        raise Broken("the analytics wrote no report")


Start: TypeAlias = Callable[[Environment], None]
PARTS: Final[Mapping[str, tuple[Extras, Start]]] = {
    "a node": (frozenset({"node"}), run_whole),
    "its dashboard": (frozenset({"dashboard"}), show_node),
    "the dashboard of queues": (frozenset({"dashboard"}), show_queues),
    "the analytics": (frozenset({"analytics"}), compute),
}
"""The optional parts: what each needs, and what starts it."""


def ask(environment: Environment, words: list[str], asked: Mapping[str, str], **variables: str) -> None:
    """Start a process, wait until each URL answers with its text, and stop it."""
    with running(words, environment.node, **variables) as (process, log):
        for url, text in asked.items():
            told = answer(process, log, url)
            if text not in told:
                raise Broken(f"{url} of `{' '.join(words[1:])}` answers without {text}:{quoted(told)}")
        stop(process, log)
