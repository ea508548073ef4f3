"""What the report says of error codes."""

from __future__ import annotations

import pytest

from federation.analytics.report.advice import meaning
from federation.codes import LOGGED_CODES, OWN_FAULTS


@pytest.mark.parametrize("code", sorted(frozenset[str]().union(*LOGGED_CODES.values())))
def test_every_code_has_a_meaning(code: str) -> None:
    """Of what is decided on this side none is blamed on a server."""
    told = meaning(code)
    assert told != meaning("A_CODE_OF_THE_FUTURE")
    assert not told.ours or code in OWN_FAULTS
