"""The header fields of signatures, read and written: those of RFC 8941 that they use, and draft-cavage's own."""

from __future__ import annotations

import binascii
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias

Parameters: TypeAlias = Mapping[str, str | int]
"""Those of a signature. RFC 8941 takes one without a value for true; it is refused, for we know of none."""

_KEY: Final = r"[a-z*][a-z0-9_.*-]*"
STRING: Final = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
_INTEGER: Final = r"-?[0-9]{1,15}"
_COMMA: Final = re.compile(r"[ \t]*,[ \t]*")
# Possessive, for strangers write these: no number of spaces takes more than linear time.
INPUT: Final = re.compile(
    rf"(?P<name>{_KEY})=\( *+(?P<covered>{STRING}(?: ++{STRING})*+)? *+\)"
    rf"(?P<parameters>(?:; *+{_KEY}=(?:{STRING}|{_INTEGER}))*+)"
)
PARAMETER: Final = re.compile(rf"; *(?P<name>{_KEY})=(?:(?P<text>{STRING})|(?P<number>{_INTEGER}))")
BYTES: Final = re.compile(rf"(?P<name>{_KEY})=:(?P<text>[A-Za-z0-9+/]*={{0,2}}):")
DIGEST: Final = re.compile(r"(?P<name>[A-Za-z0-9-]+)=(?P<text>[A-Za-z0-9+/]*={0,2})")
OTHERS: Final = re.compile(rf'(?P<name>{_KEY})=(?:[^",]|{STRING})*+')
"""A member of any form, which may be one that we do not know."""
_WORD: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
CAVAGE: Final = re.compile(rf'(?P<name>{_WORD})[ \t]*+=[ \t]*+(?:"(?P<text>[^"]*)"|(?P<token>{_WORD}))')
"""A parameter of RFC 9110 §11.2, which nobody needs to know."""


class BadSignature(Exception):
    """A request is not signed, or not as it must be. The message names the rule, and quotes nothing."""


def members(header: str, form: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Yield what is between commas; each must have this form."""
    position, is_last = 0, False
    while not is_last:
        found = form.match(header, position)
        comma = None if found is None else _COMMA.match(header, found.end())
        is_last = comma is None
        if found is None or (is_last and found.end() != len(header)):
            raise BadSignature("a header does not have its form")
        yield found
        position = comma.end() if comma else len(header)


def known(header: str, form: re.Pattern[str]) -> Iterator[re.Match[str]]:
    """Yield the members of this form. A proxy's own signature may have another one, which says nothing of the rest."""
    found = by_name(members(header, OTHERS)).values()
    fit = [each for each in (form.fullmatch(it[0].rstrip(" \t")) for it in found) if each is not None]
    if not fit:
        raise BadSignature("a header does not have its form")
    yield from fit


def by_name(found: Iterable[re.Match[str]]) -> dict[str, re.Match[str]]:
    """Return what was found by its name. Of two that have the same, others may read the first, or the last."""
    named: dict[str, re.Match[str]] = {}
    for each in found:
        if named.setdefault(each["name"], each) is not each:
            raise BadSignature("a header says the same thing twice")
    return named


def parameters_of(header: str) -> dict[str, str]:
    """Return the parameters of draft-cavage's header, by their names in lower case.

    Raises:
        BadSignature: it does not have its form, or says something twice.
    """
    told: dict[str, str] = {}
    for each in members(header, CAVAGE):
        name = each["name"].lower()
        if name in told:
            raise BadSignature("a header says the same thing twice")
        told[name] = each["token"] if each["text"] is None else each["text"]
    return told


def texts_of(found: Iterable[re.Match[str]]) -> dict[str, str]:
    """Return the texts that were found, by their names."""
    return {name: each["text"] for name, each in by_name(found).items() if each["text"] is not None}


def inner_list(covered: Sequence[str], parameters: Parameters) -> str:
    """Write components and parameters in the one form that RFC 8941 §4.1 gives them."""
    told = (f";{name}={_quoted(value) if isinstance(value, str) else value}" for name, value in parameters.items())
    return f"({' '.join(map(_quoted, covered))}){''.join(told)}"


def _quoted(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def unquoted(text: str) -> str:
    """Return what a string of RFC 8941 says."""
    return re.sub(r"\\(.)", r"\1", text[1:-1])


def decoded(text: str) -> bytes:
    """Return the bytes of a signature."""
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except ValueError:
        raise BadSignature("a signature is no base64") from None
