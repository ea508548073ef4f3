"""What applications have: the fixtures of the plugin."""

from __future__ import annotations

from federation.testing.pytest_plugin import federation_node, federation_settings, owed, remote, sealed_remote

__all__ = ["federation_node", "federation_settings", "owed", "remote", "sealed_remote"]
