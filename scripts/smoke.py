"""Builds the wheel and runs a node from it, outside this checkout: with what a newcomer gets, and nothing else.

    scripts/smoke [--full]

The wheel is built from the source archive, holds every file of the three packages, and takes the place of one of an
older commit. It is installed with each set of extras that the documents name, into an environment of its own, and
starts there all that this is for: the commands, and the parts, which answer; the analytics with `--full`, as they
need Java. A node is set up, examined, and stops in order. Then `scripts/manual.py` runs the manual, with the extras
that its programs use. Each step prints one line; the first that fails ends the script with 1 and the reason. Needs
only Python, with its venv module, and gets uv for itself unless it is there. Leaves nothing behind.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final
from zipfile import ZipFile

from environments import ROOT, URL, Environment, Installer, documented, make, pythons, try_out
from processes import COMPILED, QUOTED_LINES, Broken, answer, command, free_port, quoted, running, stop

PACKAGES: Final = ("db", "federation", "workers")
OF_THE_MANUAL: Final = frozenset({"metrics", "node", "otel", "redis"})
BUILD_SECONDS: Final = 300
MANUAL_SECONDS: Final = 480


def main() -> None:
    """Take every step. At the first that goes wrong, end with 1 and the reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="also the analytics")
    full = parser.parse_args().full
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and folders are removed, as with Ctrl-C
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="federation-smoke-") as folder:
            smoke(Path(folder), full=full)
    except Broken as broken:
        sys.exit(f"smoke: {broken}")
    except KeyboardInterrupt:
        sys.exit(130)
    say(f"the wheel works; all of it took {time.monotonic() - began:.0f} s")


def smoke(folder: Path, *, full: bool) -> None:
    uv = Installer.found(folder / "tools")
    wheel = build(uv, ROOT, folder / "wheel")
    say(f"built {wheel.name}")
    check_wheel(wheel)
    say("it holds every file of the three packages, and nothing else")
    upgrade(uv, wheel, folder)
    os.environ[COMPILED] = str(folder / "compiled")
    for extras, page in documented().items():
        named = f"[{','.join(sorted(extras))}], as in {page}"
        if "analytics" in extras and not full:
            say(f"{named}: not tried without --full")
            continue
        environment = make(uv, wheel, folder / "tried", extras)
        check_version(wheel, command(environment.federation("--version"), folder))
        say(f"{named}: {', '.join(try_out(environment))}")
    version, newest = list(pythons().items())[-1]
    environment = make(uv, wheel, folder / "newest", frozenset({"node"}), python=newest)
    say(f"on Python {version}, the newest that is here: {', '.join(try_out(environment))}")
    environment = make(uv, wheel, folder / "tried", OF_THE_MANUAL)
    run_node(environment)
    told = command(environment.python(str(ROOT / "scripts" / "manual.py")), folder, within=MANUAL_SECONDS)
    print(told, end="")
    say("all of the manual runs as it stands")


def build(uv: Installer, source: Path, out: Path) -> Path:
    """Build the archive of the sources, and from that the wheel."""
    uv.run("build", "--quiet", "--out-dir", str(out), str(source), within=BUILD_SECONDS)
    wheels = list(out.glob("*.whl"))
    if len(wheels) != 1:
        raise Broken(f"building made {len(wheels)} wheels")
    return wheels[0]


def upgrade(uv: Installer, wheel: Path, folder: Path) -> None:
    """Install the wheel of the commit before, and over it this one: what runs then is this one."""
    older = folder / "older"
    cloned = ["git", "clone", "--quiet", "--shared", str(ROOT), str(older)]
    commands = (cloned, ["git", "-C", str(older), "checkout", "--quiet", "HEAD~1"])
    if any(subprocess.run(each, capture_output=True, check=False).returncode for each in commands):
        say("there is no older commit here: no upgrade was tried")
        return
    environment = make(uv, build(uv, older, folder / "older-wheel"), folder / "upgraded", frozenset(), alone=True)
    uv.run("pip", "install", "--quiet", "--no-deps", *environment.chosen(), str(wheel))
    check_version(wheel, command(environment.python("-m", "workers", "--version"), folder), of="workers")
    say("it takes the place of a wheel of the commit before")


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


def check_version(wheel: Path, told: str, *, of: str = "federation") -> None:
    if told != f"{of} {wheel.name.split('-')[1]}\n":
        raise Broken(f"`{of} --version` of {wheel.name} says {told!r}")


def files(package: Path) -> Iterator[Path]:
    for path in package.rglob("*"):
        if path.is_file() and path.parent.name != "__pycache__" and not path.name.startswith("."):
            yield path


def differ(wanted: Mapping[str, Path], packed: Mapping[str, bytes], name: str) -> bool:
    return wanted[name].read_bytes() != packed[name]


def run_node(environment: Environment) -> None:
    """Set a node up, run it, look at it, and stop it."""
    command(environment.federation("init", "--url", URL), environment.node)
    say(f"federation init: a node for {URL}")
    port = free_port()
    with running(environment.federation("run"), environment.node, FEDERATION_PORT=str(port)) as (process, log):
        ready = json.loads(answer(process, log, f"http://127.0.0.1:{port}/readyz"))
        if ready.get("status") != "ok":
            raise Broken(f"/readyz says {ready}")
        shown = answer(process, log, f"http://127.0.0.1:{port}/discover")
        if URL not in shown:
            raise Broken(f"/discover does not name {URL}: {shown}")
        say("federation run: the node is ready and shows its name")
        examine(environment)
        say("federation doctor: nothing is amiss but that nobody finds the node by its name")
        stop(process, log)
        check_log(log)
        say("the node stopped when it was told to, with status 0")


def examine(environment: Environment) -> None:
    """Check that the doctor finds nothing wrong, except that the node is not to be found under its name.

    Right after the start, most of the recurring jobs have not run yet.
    """
    told = json.loads(command(environment.federation("doctor", "--json"), environment.node))
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


def check_log(log: Path) -> None:
    lines = log.read_text()
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


def say(what: str) -> None:
    print(f"smoke: {what}", flush=True)


if __name__ == "__main__":
    main()
