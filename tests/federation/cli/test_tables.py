"""Tables on terminals of any width."""

from __future__ import annotations

import pytest

from federation.cli.output import table_lines

COLUMNS = ("URL", "LINK", "SINCE", "REASON", "HELD", "NEXT PROBE", "LAST SEEN", "SCORE", "ADVICE")
ROWS = [
    ("https://peer.example", "up", "-", "-", "0", "-", "2026-11-22 10:00:00", "97", "none"),
    ("https://a-long-name.of-a-server.example:8443", "down", "2026-11-21 21:28:40", "CONN_REFUSED", "12",
     "2026-11-21 21:32:10", "2026-11-21 21:20:00", "-", "wait for it; if it stays away for long, forget it in the end"),
]  # fmt: skip


@pytest.mark.parametrize("width", [60, 80, 100, 132, 160, 400])
def test_no_line_is_longer_than_the_terminal_and_no_value_is_broken(width: int) -> None:
    """What fits into a line stands in one; what says nothing may be left out."""
    lines = list(table_lines(COLUMNS, ROWS, width))
    assert all(len(line) <= width for line in lines)
    whole = "\n".join(lines)
    for row in ROWS:
        assert all(cell in whole for cell in row[:-1])
        assert all(word in whole for word in row[-1].split())


def test_sixty_columns_have_a_line_for_each_value() -> None:
    """With its name before it, or above it where both do not fit."""
    assert list(table_lines(COLUMNS, ROWS, 60))[6:] == [
        "URL https://a-long-name.of-a-server.example:8443",
        "  LINK        down",
        "  SINCE       2026-11-21 21:28:40",
        "  REASON      CONN_REFUSED",
        "  HELD        12",
        "  NEXT PROBE  2026-11-21 21:32:10",
        "  LAST SEEN   2026-11-21 21:20:00",
        "  ADVICE",
        "    wait for it; if it stays away for long, forget it in the",
        "    end",
    ]


def test_a_long_last_column_is_folded_beside_the_others() -> None:
    """As the reasons of rules are."""
    rows = [("*.evil.example", "spam since Monday, and again on Tuesday")]
    assert list(table_lines(("RULE", "REASON"), rows, 40)) == [
        "RULE            REASON",
        "*.evil.example  spam since Monday, and",
        "                again on Tuesday",
    ]


def test_what_tells_of_one_thing_names_it_once() -> None:
    """However narrow the terminal is."""
    rows = [("state", "held"), ("held for", "-"), ("target", "https://a-long-name.example/posts")]
    assert list(table_lines(("", "delivery-1"), rows, 40)) == [
        "delivery-1",
        "  state     held",
        "  target",
        "    https://a-long-name.example/posts",
    ]


def test_without_a_terminal_nothing_is_folded() -> None:
    assert len(list(table_lines(COLUMNS, ROWS, None))) == 1 + len(ROWS)
