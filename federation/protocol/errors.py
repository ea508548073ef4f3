"""The errors of this package about input: every message names the place and the rule, none quotes the value."""

from __future__ import annotations

from collections.abc import Sequence


class ProtocolError(ValueError):
    """Something that came over the wire, or was to go onto it, breaks the protocol."""


class KeyMaterialError(ProtocolError):
    """One or more keys are unusable; `problems` holds one sentence per key, each naming it."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))
        self.problems = tuple(problems)


class EnvelopeError(ProtocolError):
    """An envelope is malformed or does not open; `member` names the part at fault, and is empty for the whole."""

    def __init__(self, member: str, problem: str) -> None:
        super().__init__(f"{member}: {problem}" if member else problem)
        self.member = member


class PayloadError(ProtocolError):
    """A JSON text or object lacks what its kind requires."""


class NotJson(ProtocolError):
    """A text is not JSON, or is more JSON than we are willing to parse."""


class AckMissing(ProtocolError):
    """A response body is JSON but holds no acknowledgment."""


class UrlError(ProtocolError):
    """A URL cannot name a federation server."""
