"""An application that is started in a folder without a node hears so, as an operator does."""

from __future__ import annotations

from pathlib import Path

import pytest

import federation
import federation.sync
from federation.base.errors import NoNodeHere

TOLD = r"no \.env and no database here, in .*: `federation init` makes a node"


async def test_asynchronous_code_hears_that_there_is_no_node(empty_environment: Path) -> None:
    """Before a database is looked for."""
    with pytest.raises(NoNodeHere, match=TOLD):
        async with federation.transaction():
            pass


def test_plain_code_hears_that_there_is_no_node(empty_environment: Path) -> None:
    """And no database is made there."""
    with pytest.raises(NoNodeHere, match=TOLD), federation.sync.transaction():
        pass
    assert list(empty_environment.iterdir()) == []
