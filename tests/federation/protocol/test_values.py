"""The values that are made for every delivery say in no log and no traceback what is secret."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rich.pretty import pretty_repr

from federation.protocol.acks import Ack
from federation.protocol.activities import ActivityMethod, DeliveryRequest
from federation.protocol.sealing import Envelope
from federation.protocol.values import Value

SECRET = "s3cret"
ENVELOPE = Envelope(
    ephemeral_public_key=SECRET.encode(), iv=SECRET.encode(), ciphertext=SECRET.encode(), auth_tag=SECRET.encode()
)


@pytest.mark.parametrize("shown", [repr, str, pretty_repr])
@pytest.mark.parametrize(
    "value",
    [
        Ack(data=SECRET, signature=SECRET),
        ENVELOPE,
        DeliveryRequest(method=ActivityMethod.INSERT, payload=ENVELOPE, signature=SECRET),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_to_be_shown_is_not(value: Value, shown: Callable[[object], str]) -> None:
    """By Python, and by rich, which asks by a way of its own."""
    assert SECRET not in shown(value)
    assert shown(value).startswith(type(value).__name__)
