"""Tests of flask_app.py and what it owes, without `async`: `pytest flask_test.py`."""

import sys
from collections.abc import Iterator
from importlib import import_module

import pytest
from flask.testing import FlaskClient

import federation.sync
from db import User
from federation.testing import SyncFakeSealedRemote, SyncFederationNode

pytest_plugins = ["federation.testing.pytest_plugin"]


@pytest.fixture
def client(federation_node: SyncFederationNode) -> Iterator[FlaskClient]:
    sys.modules.pop("flask_app", None)  # it opens the node's database, which each test has of its own
    application = import_module("flask_app")
    yield application.app.test_client()
    application.engine.dispose()


def test_a_note_reaches_who_follows_its_author(
    client: FlaskClient, federation_node: SyncFederationNode, sealed_remote: SyncFakeSealedRemote
) -> None:
    with federation.sync.transaction() as session:
        session.add(User(id="alice"))
    sealed_remote.follow("alice")
    assert client.post("/notes", data={"author": "alice", "text": "hello"}).status_code == 200
    federation_node.deliver()
    [post] = sealed_remote.received  # opened, and signed by the node
    assert post.activity["post"]["content"] == [{"type": "text", "value": "hello"}]


def test_a_request_that_fails_owes_nothing(
    client: FlaskClient, federation_node: SyncFederationNode, sealed_remote: SyncFakeSealedRemote
) -> None:
    with federation.sync.transaction() as session:
        session.add(User(id="alice"))
    sealed_remote.follow("alice")
    assert client.post("/notes", data={"author": "alice", "text": "bad"}).status_code == 500
    assert federation_node.owed() == []
