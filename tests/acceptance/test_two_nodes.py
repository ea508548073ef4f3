"""docs/two-nodes.md, typed as it stands: a follow and a post between two nodes on one machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.federation.test_run import Folder
from tests.patience import eventually
from tests.servers import free_port

PAGE = Path(__file__).parents[2] / "docs" / "two-nodes.md"
VARIES = re.compile(r"\b[0-9a-f]{4}\.\.\.|\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}\b|\b\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\b")
"""Ids, as they are and as the page shortens them, and times."""
WAITS = "until grep -qs node_serving log; do sleep 1; done"
"""What a shell does between a node's start and its first request, or it would come too early."""
REPEATED = ("federation deliveries stats", "federation received")
"""What a reader looks at until it shows what has just happened."""


class Shell:
    """What a reader types is done, in the folder where they are."""

    def __init__(self, folder: Path) -> None:
        self.at = Folder(folder)
        self._all = [self.at]

    async def type(self, line: str) -> str:
        """What it printed, if it goes well."""
        program, *arguments = shlex.split(line.removesuffix(" &").replace(" 2> log", "").replace(";", ""))
        if program == "mkdir":
            for name in arguments:
                (self.at.path / name).mkdir()
        elif program == "cd":
            self.at = Folder((self.at.path / arguments[0]).resolve())
            self._all.append(self.at)
        elif line.endswith(" &"):
            self._running = await self.at.start(program, *arguments)
        elif line == WAITS:
            await self._running.until_logged("node_serving")
        else:
            status, stdout, stderr = await self.at.run(*arguments)
            assert (program, status, stderr) == ("federation", 0, "")
            return stdout
        return ""

    async def until(self, line: str, printed: list[str]) -> None:
        """Typed again and again, it has come to print these words."""

        async def told() -> list[str]:
            return words(await self.type(line))

        await eventually(told, lambda found: found == printed)

    async def close(self) -> None:
        for folder in self._all:
            await folder.close()


@pytest.fixture
async def shell(tmp_path: Path) -> AsyncIterator[Shell]:
    folder = tmp_path / "reader" / "empty"
    folder.mkdir(parents=True)
    made = Shell(folder)
    yield made
    await made.close()


def shown() -> Iterator[tuple[str, str]]:
    """Each line that is to be typed, and what the page shows below it; on ports of this test's own."""
    text = PAGE.read_text()
    for port in ("8451", "8452"):
        text = text.replace(port, str(free_port()))
    for block in re.findall(r"(?:^ {4}[^\n]*\n)+", text, re.MULTILINE):
        for part in re.sub("^    ", "", block, flags=re.MULTILINE).removeprefix("$ ").split("\n$ "):
            line, _, printed = part.partition("\n")
            yield line, printed.rstrip("\n")


def words(text: str) -> list[str]:
    """Those that are the same each time, whatever the width of a column."""
    return VARIES.sub("…", text).split()


async def test_the_page_is_true(shell: Shell) -> None:
    """Every command does what is shown, in its order; what takes a moment has it."""
    typed = list(shown())
    assert len(typed) > 10
    for line, printed in typed:
        if line in REPEATED:
            await shell.until(line, words(printed))
        else:
            assert words(await shell.type(line)) == words(printed), line
