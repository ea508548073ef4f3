"""A node's dashboard, and what its pages show."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import timedelta

import pytest

from federation.dashboard.node_site import NodeSite
from federation.runtime.composition import Federation
from workers.dashboard.access import Access

MakeNodeSite = Callable[..., NodeSite]


@pytest.fixture
async def make_node_site() -> AsyncIterator[MakeNodeSite]:
    """The dashboard of a node, with these rules; its pages are brought up to date quickly."""
    made: list[NodeSite] = []

    def make(federation: Federation, access: Access, *, shows_texts: bool = False) -> NodeSite:
        interval = timedelta(milliseconds=50)
        made.append(NodeSite(federation, access=access, interval=interval, shows_texts=shows_texts))
        return made[-1]

    yield make
    for node in made:
        await node.close()


@pytest.fixture
def acting(federation: Federation, make_node_site: MakeNodeSite) -> NodeSite:
    """The dashboard of `federation`, on which everybody may act."""
    return make_node_site(federation, Access(allow_actions=True))
