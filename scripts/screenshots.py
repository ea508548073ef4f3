"""Pictures of the dashboard, taken in a real browser from the nodes of `scripts/demo`, in the middle of their outage.

Takes a minute and a half. Needs the `dev` extra and a headless Chromium on the path, as the tests in a browser do.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

sys.path.insert(0, str(Path(__file__).resolve().parent / "demonstration"))
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import story
from demonstration.__main__ import make_nodes
from nodes import Node, dashboard_of
from screen import Screen

from tests.browser.chromium import Window, chromium
from tests.patience import eventually

OUTAGE_SECONDS: Final = 75.0
"""Long enough for the node to count what is held, which it does twice a minute."""
FOLDER: Final = Path(__file__).resolve().parent.parent / "docs" / "dashboard"
LARGEST_BYTES: Final = 150_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shot:
    """A picture: of which page, and whether its reader likes it dark. `{down}` is the server that is away."""

    name: str
    path: str
    dark: bool = False
    width: int = 1200
    height: int = 860


SHOTS: Final = (
    Shot(name="overview", path="/"),
    Shot(name="overview-dark", path="/", dark=True),
    Shot(name="server", path="/server?url={down}"),
    Shot(name="deliveries-dark", path="/deliveries?state=held", dark=True),
    Shot(name="live-narrow", path="/live-attempts", width=390, height=844),
)


def main() -> int:
    """Take all pictures."""
    parser = argparse.ArgumentParser(prog="scripts/screenshots", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="where they go (docs/dashboard)")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    story.OUTAGE_SECONDS = OUTAGE_SECONDS
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="federation-shots-")))
        sender, bobs, carols = nodes = make_nodes(directory, {})
        for node in nodes:
            stack.callback(node.stop)
            node.start()
        screen = stack.enter_context(Screen(sender, [bobs, carols]))
        dashboard = dashboard_of(sender)
        stack.callback(dashboard.stop)
        dashboard.start()
        told = story.Story(sender, bobs, carols, screen=screen)
        asyncio.run(taken(told, dashboard, down=carols, folder=options.folder, profile=directory / "browser"))
    return 0


async def taken(told: story.Story, dashboard: Node, *, down: Node, folder: Path, profile: Path) -> None:
    """Take the pictures while the story is told; its end is not waited for."""
    # The demonstration tells how it goes by reading files, which must not keep the browser waiting.
    telling = asyncio.create_task(told.tell())
    try:
        async with chromium(profile) as browser:
            async with browser.window() as window:
                await is_counted(window, dashboard)
            for shot in SHOTS:
                async with browser.window(width=shot.width, height=shot.height, dark=shot.dark) as window:
                    await window.open(dashboard.url + shot.path.format(down=down.url))
                    await taken_of(window, folder / f"{shot.name}.png")
    finally:
        telling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await telling


async def is_counted(window: Window, dashboard: Node) -> None:
    """Wait until the overview knows of the outage."""

    async def look() -> str:
        await window.open(dashboard.url)
        return await window.text()

    await eventually(look, lambda text: "are held." in text)


async def taken_of(window: Window, file: Path) -> None:
    """Take what the window shows, not the page below it."""
    shown = await window.send("Page.captureScreenshot", format="png")
    await asyncio.to_thread(keep, file, base64.b64decode(shown["data"]))


def keep(file: Path, picture: bytes) -> None:
    """Write the picture, unless it is too large for the repository."""
    if len(picture) > LARGEST_BYTES:
        raise SystemExit(f"{file} would have {len(picture)} bytes, more than {LARGEST_BYTES}")
    file.write_bytes(picture)
    print(f"{file}: {len(picture)} bytes")


if __name__ == "__main__":
    sys.exit(main())
