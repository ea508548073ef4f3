"""What the parsers of commands have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TypeAlias, TypeVar

from workers.checks import check_text

T = TypeVar("T")

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""What `add_subparsers` returns, which has no public name."""


def checked(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return the same for an argument: the parser of arguments shows the message of `ArgumentTypeError` alone."""

    def parsed(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def positive(text: str) -> int:
    """Return the whole number above 0 that the text is.

    Raises:
        ValueError: it is none.
    """
    if not text.isascii() or not text.isdecimal() or not int(text):
        raise ValueError(f"{text!r} is no whole number above 0")
    return int(text)


def identifier(text: str) -> str:
    """Return the id or name that the text is.

    Raises:
        ValueError: nothing can have it.
    """
    check_text("an id or name", text)
    return text
