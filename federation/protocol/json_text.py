"""JSON with bounds: it refuses what `JSON.parse` refuses, and hostile input always ends in one error type."""

from __future__ import annotations

import gc
import json

from federation.protocol.errors import NotJson, PayloadError


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def dump_json(value: object) -> str:
    """Return *value* as JSON text with compact separators and non-ASCII characters left as they are."""
    return _ENCODER.encode(value)


def encode_text(text: str) -> bytes:
    """Return the UTF-8 bytes of *text*, the form that is signed and sealed.

    Raises:
        PayloadError: lone surrogates, which JSON can escape and UTF-8 cannot hold.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        # From None: the original error holds the whole text.
        raise PayloadError(f"payload: lone surrogate at character {error.start}") from None


def parse_json(text: str | bytes, *, limit: int) -> object:
    """Return the value that *text* holds.

    *limit* is in characters for a `str`, otherwise in bytes of UTF-8; a leading byte order mark is skipped. `NaN` and
    `Infinity` are refused, as by `JSON.parse`, and so are integers beyond Python's digit limit (4300).

    Raises:
        NotJson: too long, not UTF-8, not JSON, or nested too deeply. The message gives a position, no content.
    """
    if len(text) > limit:
        raise NotJson(f"{len(text)} characters or bytes, more than the {limit} we parse")
    try:
        decoded = text.decode("utf-8-sig") if isinstance(text, bytes) else text
        return _decode(decoded)
    except UnicodeDecodeError as error:
        raise NotJson(f"not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        # From None: the original error holds the whole document.
        raise NotJson(f"not JSON: {error.msg} at line {error.lineno} column {error.colno}") from None
    except RecursionError:
        raise NotJson("not JSON we parse: nested too deeply") from None
    except ValueError as error:
        raise NotJson(f"not JSON we parse: {error}") from None


def is_json_object(text: str | bytes, *, limit: int) -> bool:
    """Tell whether *text* holds a JSON object. Nothing else is what a server of this protocol answers."""
    try:
        return isinstance(parse_json(text, limit=limit), dict)
    except NotJson:
        return False


def _decode(text: str) -> object:
    # The garbage collector would go through the growing document again and again and find nothing: a document made of
    # empty lists takes twenty times as long, and everything else in the process waits.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return _DECODER.decode(text)
    finally:
        if was_enabled:
            gc.enable()
