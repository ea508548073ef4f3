"""A plugin of pytest: `pytest_plugins = ["federation.testing.pytest_plugin"]` in your `conftest.py`.

In a test that is a coroutine function, what waits is awaited. In any other it returns when it is done. Nothing of the
application or of a node is imported before a test asks for one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import pytest

from federation import testing

if TYPE_CHECKING:
    Node: TypeAlias = testing.FederationNode | testing.SyncFederationNode
    Remote: TypeAlias = testing.FakeRemote | testing.SyncFakeRemote
    SealedRemote: TypeAlias = testing.FakeSealedRemote | testing.SyncFakeSealedRemote


@pytest.fixture
def federation_settings() -> Mapping[str, str]:
    """Replace settings of the node, by variable: by a fixture of yours of this name."""
    return {}


@pytest.fixture
def federation_node(
    request: pytest.FixtureRequest, federation_settings: Mapping[str, str], tmp_path: Path
) -> Iterator[Node]:
    """Give the process a node until the test ends."""
    kind = testing.FederationNode if _is_awaiting(request) else testing.SyncFederationNode
    node = kind(federation_settings, folder=tmp_path)
    node.open()
    try:
        yield node
    finally:
        node.close()


@pytest.fixture
def remote(request: pytest.FixtureRequest, federation_node: Node) -> Remote:
    """Start a server of the fediverse, which ends with the node."""
    kind = testing.FakeRemote if _is_awaiting(request) else testing.SyncFakeRemote
    found = kind(federation_node)
    found.open()
    return found


@pytest.fixture
def sealed_remote(request: pytest.FixtureRequest, federation_node: Node) -> SealedRemote:
    """Start a server of the sealed wire, which ends with the node."""
    kind = testing.FakeSealedRemote if _is_awaiting(request) else testing.SyncFakeSealedRemote
    found = kind(federation_node)
    found.open()
    return found


@pytest.fixture
def owed(federation_node: Node) -> Callable[[], list[testing.OwedActivity]]:
    """Return what tells, when it is called, what the application owes; see `FederationNode.owed`."""
    return federation_node.owed


def _is_awaiting(request: pytest.FixtureRequest) -> bool:
    return inspect.iscoroutinefunction(request.function)
