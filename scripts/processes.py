"""Commands and processes outside of this checkout: they have no settings of this machine, and are gone afterwards."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import Any, Final

START_SECONDS: Final = 90
COMMAND_SECONDS: Final = 120
QUOTED_LINES: Final = 20
COMPILED: Final = "PYTHONPYCACHEPREFIX"
"""Where compiled modules are kept: for environments that lie in the same place, one after the other, once."""


class Broken(Exception):
    """A step did not do what it should; the message is the reason."""


def stop(process: subprocess.Popen[bytes], log: Path) -> None:
    """Stop it by SIGTERM: it has to end in order."""
    process.terminate()
    try:
        status = process.wait(COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise Broken(f"it did not stop within {COMMAND_SECONDS} s{quoted(log.read_text())}") from None
    if status:
        raise Broken(f"it ended with status {status}{quoted(log.read_text())}")


def answer(process: subprocess.Popen[bytes], log: Path, url: str) -> str:
    """Return what `url` answers with, as soon as it answers with success."""
    deadline = time.monotonic() + START_SECONDS
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while True:
        try:
            with direct.open(url, timeout=5) as response:
                found: str = response.read().decode()
                return found
        except (OSError, HTTPException, ValueError) as error:  # includes urllib's, for every status but success
            reason = error
        if process.poll() is not None:
            raise Broken(f"it ended with status {process.returncode}{quoted(log.read_text())}")
        if time.monotonic() > deadline:
            raise Broken(f"{url} does not answer within {START_SECONDS} s: {reason}{quoted(log.read_text())}")
        time.sleep(0.1)


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
    log = folder.parent / f"{folder.name}.log"
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
    compiled = {COMPILED: os.environ[COMPILED]} if COMPILED in os.environ else {}
    return {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **compiled}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def quoted(text: str) -> str:
    """Return the end of a long output."""
    return "".join(f"\n  {line}" for line in text.splitlines()[-QUOTED_LINES:])
