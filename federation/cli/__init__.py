"""The `federation` command: thin modules by noun, whose functions tests and other code can call, too."""

from federation.cli.app import main

__all__ = ["main"]
