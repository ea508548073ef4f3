"""docs/activitypub.md, pasted into a shell as it stands: notes to a server of Fedify, and what that sends to us."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.acceptance.test_two_nodes import words
from tests.interop.activitypub.peer import HERE as PACKAGES
from tests.interop.activitypub.peer import NODE
from tests.interop.peer import install_npm_packages
from tests.patience import PATIENCE_SECONDS, eventually
from tests.servers import free_port

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "activitypub.md"
SHOWN = re.compile(r"^```sh\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)
REPEATED = ("curl --silent ", "federation activitypub received list", "python replies.py\n")
"""What a reader looks at until it shows what has just happened begins so."""
END = "that was all of it"
PROGRAMS = {
    "federation": f'PYTHONPATH="{ROOT}:$PYTHONPATH" exec "{sys.executable}" -m federation "$@"',
    "python": f'exec "{sys.executable}" "$@"',
    "node": f'exec "{NODE}" "$@"',
    "npm": f'exec ln -s "{PACKAGES}/node_modules" .',  # what it would get
}


class Shell:
    """A reader's shell, with the programs that the page asks for."""

    def __init__(self, process: asyncio.subprocess.Process, pasted: Path) -> None:
        self._process = process
        self._pasted = pasted

    async def paste(self, block: str) -> str:
        """What it printed once all of it has ended, but for what goes on behind it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pasted.write_text(block)
        self._process.stdin.write(f". {self._pasted} < /dev/null; echo {END}\n".encode())
        async with asyncio.timeout(PATIENCE_SECONDS):
            told = await self._process.stdout.readuntil(f"{END}\n".encode())
        return told.decode().removesuffix(f"{END}\n")

    async def until(self, block: str, printed: list[str]) -> None:
        """Pasted again and again, it has come to print these words."""

        async def told() -> list[str]:
            return words(await self.paste(block))

        await eventually(told, lambda found: found == printed)


@pytest.fixture
async def shell(tmp_path: Path) -> AsyncIterator[Shell]:
    """In a folder with the documents; all that was started there is gone afterwards."""
    install_npm_packages(PACKAGES)
    if not NODE.exists() or shutil.which("curl") is None:
        pytest.skip("THE PAGE OF ACTIVITYPUB WAS NOT TYPED: it needs curl, and a Node for Linux on x86-64")
    programs, checkout = tmp_path / "bin", tmp_path / "checkout"
    for folder in (programs, checkout):
        folder.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    (checkout / "docs").symlink_to(ROOT / "docs")
    process = await asyncio.create_subprocess_exec(
        "bash",
        cwd=checkout,
        env={"PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield Shell(process, tmp_path / "pasted")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        await process.communicate()


def shown() -> list[tuple[str, str]]:
    """Each block that is to be pasted, and what the page shows below it; on ports of this test's own."""
    text = PAGE.read_text()
    for port in ("8451", "8452"):
        text = text.replace(port, str(free_port()))
    return SHOWN.findall(text)


@pytest.mark.timeout(900)
async def test_the_page_is_true(shell: Shell) -> None:
    """Every block prints what is shown, in its order; what takes a moment has it."""
    pasted = shown()
    assert len(pasted) > 5
    for block, printed in pasted:
        if block.startswith(REPEATED):
            await shell.until(block, words(printed))
        else:
            assert words(await shell.paste(block)) == words(printed), block


def test_its_fedify_is_the_one_that_we_test_with() -> None:
    version = json.loads((PACKAGES / "package.json").read_text())["dependencies"]["@fedify/fedify"]
    assert f"npm install --silent --prefix . @fedify/fedify@{version}\n" in PAGE.read_text()


def test_its_programs_are_short() -> None:
    """As it says."""
    assert all(path.read_text().count("\n") <= 60 for path in (ROOT / "docs" / "examples" / "activitypub").iterdir())
