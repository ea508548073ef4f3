"""Builds the wheel and runs a node from it, outside this checkout: with what a newcomer gets, and nothing else.

    scripts/smoke

The wheel holds every file of the three packages, is installed with its extra `node` into an environment of its own, and
a node from there is set up, answers, is examined and stops in order. Then `scripts/manual.py` runs the manual, with
the extras that its programs use. Each step prints one line; the first that fails ends the script with 1 and the reason.
Needs only Python, with its venv module. Leaves nothing behind.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final
from zipfile import ZipFile

ROOT: Final = Path(__file__).resolve().parent.parent
PACKAGES: Final = ("db", "federation", "workers")
URL: Final = "https://node.example"
"""A URL that never belongs to anybody: the doctor cannot find the node there."""
PIP_SECONDS: Final = 300
START_SECONDS: Final = 90
COMMAND_SECONDS: Final = 120
MANUAL_SECONDS: Final = 480
QUOTED_LINES: Final = 20


class Broken(Exception):
    """A step did not do what it should; the message is the reason."""


def main() -> None:
    """Take every step. At the first that goes wrong, end with 1 and the reason."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and folders are removed, as with Ctrl-C
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="federation-smoke-") as folder:
            smoke(Path(folder))
    except Broken as broken:
        sys.exit(f"smoke: {broken}")
    except KeyboardInterrupt:
        sys.exit(130)
    say(f"the wheel works; all of it took {time.monotonic() - began:.0f} s")


def smoke(folder: Path) -> None:
    python = folder / "venv" / "bin" / "python"
    command([sys.executable, "-m", "venv", str(python.parent.parent)], folder, within=PIP_SECONDS)
    wheel = build(python, folder)
    say(f"built {wheel.name}")
    check_wheel(wheel)
    say("it holds every file of the three packages, and nothing else")
    # Modules are compiled when they are first imported: that is part of the time.
    pip(python, folder, "install", "--no-compile", "--constraint", str(ROOT / "constraints.txt"), f"{wheel}[node]")
    pip(python, folder, "check")
    say("installed it with its extra `node`")
    check_version(wheel, command([str(python.parent / "federation"), "--version"], folder))
    node = folder / "node"
    node.mkdir()
    run_node(python.parent / "federation", node)
    pip(python, folder, "install", "--constraint", str(ROOT / "constraints.txt"), f"{wheel}[metrics,otel,redis]")
    told = command([str(python), str(ROOT / "scripts" / "manual.py")], folder, within=MANUAL_SECONDS)
    print(told, end="")
    say("all of the manual runs as it stands")


def build(python: Path, folder: Path) -> Path:
    pip(python, folder, "wheel", "--no-deps", "--wheel-dir", str(folder / "wheel"), str(ROOT))
    wheels = list((folder / "wheel").iterdir())
    if len(wheels) != 1:
        raise Broken(f"building made {len(wheels)} wheels")
    return wheels[0]


def check_wheel(wheel: Path) -> None:
    """Check that the wheel has the files of this checkout, with their contents, and no other package.

    It is compared with the folders, not with what git knows: what is ignored by mistake would be missing in the wheel,
    too.
    """
    with ZipFile(wheel) as archive:
        packed = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    wanted = {path.relative_to(ROOT).as_posix(): path for package in PACKAGES for path in files(ROOT / package)}
    for problem, names in (
        ("lacks", wanted.keys() - packed.keys()),
        ("has another version of", {name for name in wanted.keys() & packed.keys() if differ(wanted, packed, name)}),
        ("also has", {name for name in packed.keys() - wanted.keys() if ".dist-info/" not in name}),
    ):
        if names:
            first = ", ".join(sorted(names)[:QUOTED_LINES])
            raise Broken(f"the wheel {problem} {first}" + " ..." * (len(names) > QUOTED_LINES))


def check_version(wheel: Path, told: str) -> None:
    version = wheel.name.split("-")[1]
    if told != f"federation {version}\n":
        raise Broken(f"`federation --version` of {wheel.name} says {told!r}")
    say(f"federation --version: {version}")


def files(package: Path) -> Iterator[Path]:
    for path in package.rglob("*"):
        if path.is_file() and path.parent.name != "__pycache__" and not path.name.startswith("."):
            yield path


def differ(wanted: Mapping[str, Path], packed: Mapping[str, bytes], name: str) -> bool:
    return wanted[name].read_bytes() != packed[name]


def run_node(federation: Path, node: Path) -> None:
    """Set a node up in the folder `node`, run it, look at it, and stop it."""
    command([str(federation), "init", "--url", URL], node)
    say(f"federation init: a node for {URL}")
    port = free_port()
    with running([str(federation), "run"], node, FEDERATION_PORT=str(port)) as (process, log):
        ready = answer(process, log, f"http://127.0.0.1:{port}/readyz")
        if ready.get("status") != "ok":
            raise Broken(f"/readyz says {ready}")
        shown = answer(process, log, f"http://127.0.0.1:{port}/discover")
        if URL not in json.dumps(shown):
            raise Broken(f"/discover does not name {URL}: {shown}")
        say("federation run: the node is ready and shows its name")
        examine(federation, node)
        say("federation doctor: nothing is amiss but that nobody finds the node by its name")
        stop(process, log)
        say("the node stopped when it was told to, with status 0")


def examine(federation: Path, node: Path) -> None:
    """Check that the doctor finds nothing wrong, except that the node is not to be found under its name.

    Right after the start, most of the recurring jobs have not run yet.
    """
    told = json.loads(command([str(federation), "doctor", "--json"], node))
    verdicts = {finding["check"]: finding["verdict"] for finding in told["findings"]}
    of_the_place = (
        "settings",
        "keys",
        "database",
        "writes",
        "host",
        "queues",
        "storage",
        "sharing",
        "proxies",
        "clock",
    )
    expected = {name: {"ok"} for name in (*of_the_place, "peer keys", "backlog", "given up", "claims")}
    expected |= {
        "open files": {"ok", "warning"},
        "scheduler": {"ok", "note", "warning"},
        "sweeps": {"ok", "note", "warning"},
        "/discover": {"note", "warning"},
    }
    lacking = expected.keys() - verdicts.keys()
    if lacking or any(verdict not in expected.get(name, {"ok"}) for name, verdict in verdicts.items()):
        raise Broken(f"the doctor finds {json.dumps(told)}")


def stop(process: subprocess.Popen[bytes], log: Path) -> None:
    process.terminate()
    try:
        status = process.wait(COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise Broken(f"the node did not stop within {COMMAND_SECONDS} s{quoted(log.read_text())}") from None
    lines = log.read_text()
    if status:
        raise Broken(f"the node ended with status {status}{quoted(lines)}")
    events = [logged(line) for line in lines.splitlines()]
    if any(event["level"] in ("error", "critical") for event in events) or events[-1]["event"] != "stopped":
        raise Broken(f"the node's log is not as it should be:{quoted(lines)}")


def logged(line: str) -> dict[str, Any]:
    """Return the event in a line of the log; a line that is none counts as an error."""
    try:
        event: dict[str, Any] = json.loads(line)
        return event
    except ValueError:
        return {"event": line, "level": "error"}


def answer(process: subprocess.Popen[bytes], log: Path, url: str) -> dict[str, Any]:
    """Return the JSON object that `url` answers with, as soon as it answers with success."""
    deadline = time.monotonic() + START_SECONDS
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            with direct.open(url, timeout=5) as response:
                found: dict[str, Any] = json.load(response)
                return found
        except (OSError, HTTPException, ValueError) as error:  # includes urllib's, for every status but success
            reason = error
        if process.poll() is not None:
            raise Broken(f"the node ended with status {process.returncode}{quoted(log.read_text())}")
        if time.monotonic() > deadline:
            raise Broken(f"{url} does not answer within {START_SECONDS} s: {reason}{quoted(log.read_text())}")
        time.sleep(0.1)


def pip(python: Path, folder: Path, *arguments: str) -> None:
    """Run pip in the environment of `python`. Its own settings apply, such as where to find packages."""
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    command([str(python), "-m", "pip", "--disable-pip-version-check", *arguments], folder, settings, within=PIP_SECONDS)


def command(
    arguments: Sequence[str],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    *,
    within: float = COMMAND_SECONDS,
) -> str:
    """Run the command, and return what it prints on stdout. It has to end with 0, and in time."""
    process = begin(arguments, folder, environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        printed, complaints = (text.decode() for text in process.communicate(timeout=within))
    except subprocess.TimeoutExpired:
        raise Broken(f"`{' '.join(arguments)}` did not end within {within:.0f} s") from None
    finally:
        end(process)
    if process.returncode:
        raise Broken(f"`{' '.join(arguments)}` ended with status {process.returncode}{quoted(printed + complaints)}")
    return printed


@contextmanager
def running(arguments: Sequence[str], folder: Path, **more: str) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start the process, and yield it with the file of its log. It is gone afterwards."""
    log = folder.parent / "log"
    with log.open("wb") as file:
        process = begin(arguments, folder, {**bare_environment(), **more}, stdout=file, stderr=file)
    try:
        yield process, log
    finally:
        end(process)


def begin(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None, **streams: Any
) -> subprocess.Popen[bytes]:
    """Start the command in a session of its own.

    So `end` finds what it started, and Ctrl-C only reaches this program.
    """
    variables = bare_environment() if environment is None else environment
    return subprocess.Popen(
        arguments, cwd=folder, env=variables, stdin=subprocess.DEVNULL, start_new_session=True, **streams
    )


def end(process: subprocess.Popen[bytes]) -> None:
    """Stop it and everything that it started, unless it has ended by itself."""
    if process.poll() is None:  # otherwise its number may be another process's by now
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(COMMAND_SECONDS)


def bare_environment() -> dict[str, str]:
    """Return an environment without settings of this machine: neither a node's nor a checkout on PYTHONPATH."""
    return {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def quoted(text: str) -> str:
    """Return the end of a long output."""
    return "".join(f"\n  {line}" for line in text.splitlines()[-QUOTED_LINES:])


def say(what: str) -> None:
    print(f"smoke: {what}", flush=True)


if __name__ == "__main__":
    main()
