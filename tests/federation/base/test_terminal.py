"""What peers wrote cannot steer an operator's terminal, and cannot make up a line of the log."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from federation.base.logs import configure_logging
from federation.base.terminal import escaped, escaped_json, mind_crashes, show_escapes, spaced
from federation.cli.output import confirm, print_json, print_lines, print_table
from federation.cli.problems import expect, fail

EVERY_CODE_POINT = "".join(map(chr, range(sys.maxunicode + 1)))
OBEYED = {"Cc", "Cf", "Cs", "Zl", "Zp"}
OBEYED_ONES = {each for each in EVERY_CODE_POINT if unicodedata.category(each) in OBEYED - {"Cs"}} | {"\ud800"}
HOSTILE = "x\x1b]0;PWNED\x07\x1b[2J\x9b31m\r\n2026-01-01T00:00:00Z [error] database_away\u202e\u2066\u2028\x7f\ud800"
STYLE = re.compile(r"\x1b\[[0-9]{1,2}m")
"""The renderer's own; what is hostile here has others."""


class Terminal(io.StringIO):
    """Takes what UTF-8 can carry, as a terminal does."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        text.encode()
        return super().write(text)


@contextmanager
def logging_to(screen: io.StringIO) -> Iterator[None]:
    """A process logs there, at its most talkative."""
    root, before = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers, root.level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stderr", screen)
        configure_logging("debug")
        try:
            yield
        finally:
            root.handlers = handlers
            root.setLevel(level)
            structlog.configure(**before)


class Hostile:
    """Writes itself as it likes."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


class HostileError(Exception):
    pass


def log_everywhere(text: str) -> int:
    """Log *text* wherever an event has text; how many events these were."""
    log, library = structlog.get_logger("ours"), logging.getLogger("theirs")
    log.warning("event", value=text, nested=[text, {text: (text,)}], written=Hostile(text), number=1)
    log.warning(text, **{f"key{text}": "value"})
    log.warning("block", stack=text, exception=text)
    log.warning("name", logger=text, logger_name=text)
    library.warning("message %s %r", text, Hostile(text))
    try:
        raise type(f"Error{text.encode('ascii', 'backslashreplace').decode()}".replace("\0", "0"), (Exception,), {})(
            text
        )
    except Exception:
        log.exception("crash", value=text)
        library.exception("crash %s", text)
    return 7


def assert_harmless(written: str, events: int) -> None:
    """Nothing is there that a terminal obeys but the renderer's own styles, and no line that nobody logged."""
    plain = STYLE.sub("", written)
    assert plain.replace("\n", "").isprintable(), ascii(plain)
    assert len(re.findall(r"^[^ =\n]", plain, re.MULTILINE)) == events, plain


@given(text=st.text(st.characters(), max_size=30) | st.just(HOSTILE))
def test_no_text_of_a_peer_steers_the_terminal(text: str) -> None:
    """Of any code points, lone surrogates included: in events, keys, values, names, exceptions and stacks."""
    screen = Terminal()
    with logging_to(screen):
        events = log_everywhere(text)
    assert_harmless(screen.getvalue(), events)


def test_no_code_point_steers_the_terminal() -> None:
    """None of the 1 114 112 is left to chance: what remains of them all is neither control, format nor separator."""
    for plain in (spaced, escaped):
        kept = set(plain(EVERY_CODE_POINT))
        assert {unicodedata.category(each) for each in kept}.isdisjoint(OBEYED)
        assert kept & OBEYED_ONES == set()
    screen = Terminal()
    with logging_to(screen):
        events = log_everywhere("".join(sorted(OBEYED_ONES)))
    assert_harmless(screen.getvalue(), events)


def test_what_was_written_can_still_be_read() -> None:
    """Escaped as Python does, and other scripts as they are."""
    screen = Terminal()
    with logging_to(screen):
        structlog.get_logger().warning("post_received", federation_post_id="x\x1b[1mé\n", name="名前")
    written = STYLE.sub("", screen.getvalue())
    assert r"federation_post_id='x\x1b[1mé\n'" in written
    assert "name=名前" in written


def test_json_lines_are_ascii() -> None:
    """For programs, which get the very text; whoever looks at it on a terminal sees escapes."""
    screen = io.StringIO()
    with logging_to(screen):
        structlog.get_logger().warning(HOSTILE, value=HOSTILE)
        logging.getLogger("library").warning("%s", HOSTILE)
    ours, library = screen.getvalue().splitlines()
    assert (ours + library).isascii()
    assert (ours + library).isprintable()
    assert (json.loads(ours)["value"], json.loads(library)["event"]) == (HOSTILE, HOSTILE)


def test_tables_lines_errors_and_questions_are_printed_harmless(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stdout and on stderr, and as JSON, which reads back as what it was."""
    expect([])
    print_table(("URL",), [(HOSTILE,)])
    print_lines([HOSTILE])
    with pytest.raises(SystemExit):
        fail(HOSTILE, HOSTILE)
    told = capsys.readouterr()
    assert (told.out + told.err).replace("\n", "").isprintable()
    assert len(told.out.splitlines()) == len(told.err.splitlines()) == 3
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    confirm(HOSTILE, yes=False)
    assert capsys.readouterr().err.isprintable()
    everything = "".join(sorted(OBEYED_ONES)) + "\U000e0001 é\U0001f600"
    print_json({HOSTILE: [HOSTILE, everything]})
    document = capsys.readouterr().out
    assert document.replace("\n", "").isprintable()
    assert document == escaped_json(document)
    assert json.loads(document) == {HOSTILE: [HOSTILE, everything]}


def test_a_traceback_of_the_interpreter_is_printed_harmless(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Causes, notes and groups as well; a message is one line, whatever it holds."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    mind_crashes()
    try:
        try:
            raise ValueError(HOSTILE)
        except ValueError as cause:
            error = LookupError(HOSTILE)
            error.add_note(HOSTILE)
            raise ExceptionGroup(HOSTILE, [error]) from cause
    except ExceptionGroup as group:
        sys.excepthook(type(group), group, group.__traceback__)
    told = capsys.readouterr().err
    assert told.replace("\n", "").isprintable()
    assert r"ValueError: x\x1b]0;PWNED" in told
    assert "\n2026" not in told
    assert "LookupError" in told


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
@pytest.mark.parametrize("as_json", [True, False], ids=["json", "text"])
def test_what_a_terminal_cannot_show_is_escaped(encoding: str, as_json: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As JSON has it, so that JSON can be read."""
    screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    monkeypatch.setattr("sys.stdout", screen)
    show_escapes()
    (print_json if as_json else lambda text: print_lines([text]))("fish \U0001f41f\u2713")
    screen.seek(0)
    shown = screen.read().rstrip()
    assert shown == ('"fish \\ud83d\\udc1f\\u2713"' if as_json else "fish \\ud83d\\udc1f\\u2713")
