"""The report in a real browser: it fits, it can be read, and what strangers called themselves runs and asks nothing."""

from __future__ import annotations

import html
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import TypeAlias

import pytest

from federation.analytics.frames import Action
from federation.analytics.report.findings import AdviceChange, Appearance, Changes, Findings, Turnover
from federation.analytics.report.page import render
from tests.browser.axe import violations
from tests.browser.chromium import chromium, find_chromium
from tests.federation.analytics.report.hostile import hostile_findings
from tests.patience import PATIENCE_SECONDS

PHONE, DESKTOP = 390, 1440
MADE_AT = datetime(2026, 3, 31, 4, 12, tzinfo=UTC)
HOST = "evil.test"
SCRIPT = "document.title=1"
FORBIDDEN = (
    f"<script>{SCRIPT}</script>",
    f"<script src=http://{HOST}/s></script>",
    f"<img src=x onerror={SCRIPT}>",
    f"<img src=http://{HOST}/i>",
    f"<svg onload={SCRIPT}></svg>",
    f"<svg><image href=http://{HOST}/v /></svg>",
    f"<iframe src=http://{HOST}/f></iframe>",
    f"<link rel=stylesheet href=http://{HOST}/c>",
    f"<style>@import url(http://{HOST}/d)</style>",
    f"<style>*{{background:url(http://{HOST}/b)}}</style>",
    f"<embed src=http://{HOST}/e>",
    f"<object data=http://{HOST}/o></object>",
    f"<video src=http://{HOST}/m autoplay></video>",
    f"<input autofocus onfocus={SCRIPT}>",
    f"<details open ontoggle={SCRIPT}></details>",
    f"<base href=http://{HOST}/><img src=x>",
)
"""What the policy of a page can forbid."""
OTHERS = (
    f"<link rel=preconnect href=http://{HOST}>",
    f"<link rel=dns-prefetch href=//{HOST}>",
    f"<meta http-equiv=refresh content='0;url=http://{HOST}/r'>",
)
"""What it cannot."""
QUIET = ("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run")
"""Keeps a whole Chromium from asking on its own for what no page asked for."""
WAYS_OUT = ("", "</title>", "</style>", "</script>", "\"'>", "<!-->", "</p></td>")
"""Of where a text may stand; each payload is short, because the page cuts what is longer than anybody reads."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What became of a page: its elements once it has settled, and the browser's own log of the network."""

    document: str
    network: str

    @property
    def ran(self) -> bool:
        return "<title>1</title>" in self.document

    @property
    def asked(self) -> bool:
        return HOST in self.network


Look: TypeAlias = Callable[[str], Seen]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Opens a page in headless Chromium. No name resolves, so that nothing leaves this machine."""
    browser = find_chromium()

    def opened(page: str) -> Seen:
        file, log = tmp_path / "report.html", tmp_path / "network.json"
        file.write_text(page, encoding="utf-8")
        done = subprocess.run(
            [
                browser,
                "--headless",
                "--no-sandbox",  # it cannot have one where root runs the tests
                "--disable-gpu",
                "--disable-dev-shm-usage",
                *QUIET,
                f"--user-data-dir={tmp_path / 'profile'}",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                f"--log-net-log={log}",
                "--virtual-time-budget=3000",
                "--dump-dom",
                file.as_uri(),
            ],
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
            check=True,
        )
        return Seen(done.stdout, log.read_text(encoding="utf-8"))

    return opened


def test_in_a_browser_hostile_names_run_nothing_and_ask_for_nothing(findings: Findings, look: Look) -> None:
    """They are shown, each in its place, and the page is the one that was made."""
    texts = [f"{way}{payload}" for way, payload in product(WAYS_OUT, FORBIDDEN + OTHERS)]
    seen = look(render(hostile_findings(findings, *texts, f'" onmouseover={SCRIPT} x="\u202e'), made_at=MADE_AT))
    assert not seen.ran
    assert not seen.asked
    shown = [text for text in texts if html.escape(text, quote=False) in seen.document]
    for part in FORBIDDEN + OTHERS + WAYS_OUT:
        assert any(part in text for text in shown), part
    assert "<title>Federation health as of " in seen.document


def test_should_a_name_get_past_the_escaping_the_page_still_runs_and_asks_nothing(
    findings: Findings, look: Look
) -> None:
    """By its policy alone, which comes before everything that a name could be in."""
    page = render(findings, made_at=MADE_AT)
    seen = look(page.replace("<main>", f"<main>{''.join(FORBIDDEN)}", 1))
    assert "<script>" in seen.document
    assert not seen.ran
    assert not seen.asked


def test_without_either_a_browser_does_both(look: Look) -> None:
    """What the tests above say is not there would be seen."""
    seen = look(f"<!doctype html><title>a page</title>{''.join(FORBIDDEN)}")
    assert seen.ran
    assert seen.asked


def full_findings(findings: Findings) -> Findings:
    """With a list that has pages, and something to tell in every part."""
    many = [replace(findings.attention[-1], url=f"https://{number}.example") for number in range(130)]
    day = findings.as_of
    change = AdviceChange(url="https://a.example", before=Action.KEEP, now=Action.WATCH, reason="down " * 30)
    appeared = (Appearance(url=f"https://{'long-name-' * 9}.example", day=day, action=Action.KEEP),)
    return replace(
        findings,
        attention=(*findings.attention, *many),
        changes=Changes(since=day, worse=(change,), worse_count=1, better=(change,), better_count=30),
        turnover=Turnover(since=day, arrived=appeared, arrived_count=1, vanished=appeared, vanished_count=1),
        completeness=replace(findings.completeness, missing=(day,), early=(day,), purged=(day,)),
        error_totals={**findings.error_totals, "DATABASE": 10_000},
    )


@pytest.mark.parametrize("kind", ["full", "hostile"])
async def test_it_fits_a_phone_and_a_desktop_in_light_and_dark(findings: Findings, tmp_path: Path, kind: str) -> None:
    """Nothing makes the page wider than its window, and axe-core finds nothing wrong, all lists open or not."""
    told = (
        full_findings(findings) if kind == "full" else hostile_findings(findings, "<b>" * 60, "\u202e" * 9, "x" * 300)
    )
    file = tmp_path / "report.html"
    file.write_text(render(told, made_at=MADE_AT), encoding="utf-8")
    async with chromium(tmp_path / "profile") as browser, browser.window() as window:
        await window.open(file.as_uri())
        for is_open, width, dark in product((False, True), (PHONE, DESKTOP), (False, True)):
            await window.looks(width=width, dark=dark)
            await window.ask(
                f"document.querySelectorAll('details').forEach(each => {{ each.open = {str(is_open).lower()} }})"
            )
            assert await window.ask("document.documentElement.clientWidth") == width
            assert await window.ask("document.documentElement.scrollWidth") <= width, (is_open, width)
        for width, dark in ((PHONE, True), (DESKTOP, False)):
            await window.looks(width=width, dark=dark)
            assert await violations(window) == []
        assert window.errors == []
