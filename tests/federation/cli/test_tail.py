"""`federation deliveries tail`, in a process of its own, while attempts end elsewhere."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from db import AttemptNote, AttemptOutcome
from tests import warm
from tests.federation.cli.elsewhere import PEER, end_attempts
from tests.federation.cli.test_json import COMMANDS, matches
from tests.patience import PATIENCE_SECONDS

HOSTILE = "\x1b[31mred\u202e\nforged <b>"


@contextmanager
def tail(
    environment: Mapping[str, str], *options: str, stdout: int = subprocess.PIPE
) -> Iterator[subprocess.Popen[str]]:
    # A shell starts what is in its background without Ctrl-C, and so would we start this.
    was = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [warm.PYTHON, "-m", "federation", "deliveries", "tail", *options],
            env=dict(environment),
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGINT, was)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def ended_by(process: subprocess.Popen[str], number: signal.Signals) -> tuple[int, str, str]:
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=PATIENCE_SECONDS)
    return process.returncode, stdout, stderr


def test_attempts_are_shown_as_they_end(node_environment: Mapping[str, str]) -> None:
    """Those before, then each new one; Ctrl-C is the way to end it, and no error."""
    end_attempts("one", "two")
    with tail(node_environment, "--last", "1") as process:
        before = line_of(process)
        assert re.fullmatch(rf"\S+ \S+  delivered  {re.escape(PEER)}  federate post  #1  34 ms  201  two\n", before), (
            before
        )
        end_attempts("three", note=AttemptNote.FORGED_ACK)
        three = line_of(process)
        assert "  delivered, forged ack  " in three
        assert three.endswith("  201  three\n")
        end_attempts("four", outcome=AttemptOutcome.RETRYABLE, code="HTTP_410", note=AttemptNote.GIVEN_UP)
        assert "  given up   " in line_of(process)
        end_attempts(HOSTILE, outcome=AttemptOutcome.PERMANENT, code="HTTP_500", said=HOSTILE)
        hostile = line_of(process).removesuffix("\n")
        assert hostile.isprintable()
        assert "permanent" in hostile
        assert "HTTP_500" in hostile
        assert ended_by(process, signal.SIGINT) == (0, "", "")


def test_each_is_one_document_in_one_line(node_environment: Mapping[str, str]) -> None:
    """With the fields that are written down; only those that are asked for."""
    end_attempts("one")
    end_attempts(HOSTILE, outcome=AttemptOutcome.RETRYABLE, code="HTTP_500", said=HOSTILE)
    options = ["--json", "--outcome", "retryable", "--server", "peer.example", "--code", "HTTP_500"]
    with tail(node_environment, *options) as process:
        line = line_of(process)
        assert line.removesuffix("\n").isprintable()
        document = json.loads(line)
        assert matches(document, COMMANDS["deliveries tail"])
        assert (document["delivery_id"], document["remote_code"]) == (HOSTILE, HOSTILE)
        assert ended_by(process, signal.SIGINT) == (0, "", "")


def test_a_reader_that_has_seen_enough_ends_it(node_environment: Mapping[str, str]) -> None:
    """As `| head` does."""
    end_attempts("one")
    with tail(node_environment) as process:
        line_of(process)
        assert process.stdout is not None
        process.stdout.close()
        end_attempts("two")
        assert process.wait(timeout=PATIENCE_SECONDS) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_a_terminal_gets_colours(node_environment: Mapping[str, str]) -> None:
    """Of ours, and no others."""
    end_attempts(HOSTILE, outcome=AttemptOutcome.PERMANENT, code="HTTP_500", said=HOSTILE)
    ours, theirs = pty.openpty()
    with tail({**node_environment, "TERM": "xterm"}, stdout=theirs):
        os.close(theirs)
        line = b""
        while not line.endswith(b"\n"):
            line += os.read(ours, 1_000)
    os.close(ours)
    assert re.findall(rb"\x1b\[[0-9;]*m", line) == [b"\x1b[31m", b"\x1b[0m"]
    assert line.count(b"\n") == 1
