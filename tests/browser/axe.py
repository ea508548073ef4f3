"""What axe-core says of a page: whether people who do not see it, or use no mouse, can use it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from tests.browser.chromium import Window
from tests.interop.peer import install_npm_packages

HERE = Path(__file__).parent


@cache
def _axe() -> str:
    install_npm_packages(HERE)
    return (HERE / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


async def violations(window: Window) -> list[str]:
    """Each rule that the page breaks, and where. The page's own policy stays on: axe comes in through the debugger."""
    await window.ask(f"{_axe()}; 0")
    found = json.loads(await window.ask("axe.run(document).then(r => JSON.stringify(r.violations))"))
    return [
        f"{rule['id']}: {node['html'][:200]} {node['failureSummary'][:300]}" for rule in found for node in rule["nodes"]
    ]
