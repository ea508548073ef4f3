"""A real browser that tests click through: headless Chromium, driven over a pipe by its DevTools protocol.

There is no driver between: a test says what a person does (`click`, `fill`, `press`) and what must be seen. Nothing
waits for a fixed time; `seen` asks again and again. No name resolves but this machine's own, so that nothing leaves it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from tests.patience import PATIENCE_SECONDS, eventually

BROWSERS: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
NOT_RUN: Final = "NOT RUN IN A BROWSER: there is no Chromium (apt install chromium-headless-shell)"

_KEYS: Final = {"Tab": 9, "Enter": 13, "Escape": 27, " ": 32}


class PageError(AssertionError):
    """What the page was asked failed there."""


class Chromium:
    """One browser; every window has cookies of its own."""

    def __init__(self, process: asyncio.subprocess.Process, reader: asyncio.StreamReader, writer: Any) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.errors: dict[str, list[str]] = {}
        """By window: exceptions of scripts, and what the policy of a page kept from happening."""

    async def send(self, method: str, *, session: str | None = None, **parameters: object) -> dict[str, Any]:
        """One command, and what the browser answers to it."""
        number = next(self._numbers)
        message: dict[str, object] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        waiting = self._answers[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps(message).encode() + b"\0")
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                answer = await waiting
        finally:
            del self._answers[number]
        if "error" in answer:
            raise PageError(f"{method}: {answer['error'].get('message')}")
        result: dict[str, Any] = answer["result"]
        return result

    async def listen(self) -> None:
        """Hand out what the browser says, until it ends."""
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
                if (answered := self._answers.get(message.get("id"))) is not None and not answered.done():
                    answered.set_result(message)
                else:
                    self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        errors, said = self.errors.setdefault(message.get("sessionId", ""), []), message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            errors.append(json.dumps(said["exceptionDetails"])[:500])
        elif message.get("method") == "Log.entryAdded" and said["entry"]["source"] in ("security", "javascript"):
            errors.append(said["entry"]["text"])

    @asynccontextmanager
    async def window(self, *, width: int = 1440, height: int = 900, dark: bool = False) -> AsyncIterator[Window]:
        """A window with nothing in it, and no cookies."""
        context = (await self.send("Target.createBrowserContext"))["browserContextId"]
        target = await self.send("Target.createTarget", url="about:blank", browserContextId=context)
        attached = await self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        window = Window(self, attached["sessionId"])
        for domain in ("Page", "Runtime", "Log", "Network"):
            await window.send(f"{domain}.enable")
        await window.looks(width=width, height=height, dark=dark)
        try:
            yield window
        finally:
            await self.send("Target.disposeBrowserContext", browserContextId=context)

    async def close(self) -> None:
        with contextlib.suppress(PageError, TimeoutError):
            await self.send("Browser.close")
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self._process.wait()
        self._writer.close()


class Window:
    """What one person sees and does."""

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session

    @property
    def errors(self) -> list[str]:
        return self._browser.errors.get(self._session, [])

    async def send(self, method: str, **parameters: object) -> dict[str, Any]:
        return await self._browser.send(method, session=self._session, **parameters)

    async def looks(self, *, width: int, height: int = 900, dark: bool) -> None:
        """The window's size, and whether its person likes it dark."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.send("Emulation.setEmulatedMedia", features=[scheme])

    async def lives_in(self, zone: str) -> None:
        """The time zone of its person."""
        await self.send("Emulation.setTimezoneOverride", timezoneId=zone)

    async def scripts(self, allowed: bool) -> None:
        """Whether pages may run scripts from now on."""
        await self.send("Emulation.setScriptExecutionDisabled", value=not allowed)

    async def open(self, url: str) -> None:
        """Go there, and wait until the page is whole."""
        answer = await self.send("Page.navigate", url=url)
        assert "errorText" not in answer, answer["errorText"]
        await eventually(lambda: self.ask("document.readyState"), lambda state: state == "complete")

    async def ask(self, script: str) -> Any:
        """What the expression is in the page; None while one page gives way to the next."""
        try:
            answer = await self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        except PageError as error:
            if "context" in str(error) or "navigated" in str(error):
                return None
            raise
        if "exceptionDetails" in answer:
            raise PageError(f"{script[:200]}: {json.dumps(answer['exceptionDetails'])[:500]}")
        return answer["result"].get("value")

    async def text(self) -> str:
        """All that is seen."""
        return await self.ask("document.body ? document.body.innerText : ''") or ""

    async def sees(self, text: str) -> None:
        """It is there, or will be soon."""
        await eventually(self.text, lambda seen: text in seen)

    async def click(self, what: str) -> None:
        """Press the mouse on a link, button or label with this text, or on what `css=SELECTOR` names."""
        place = await eventually(lambda: self.ask(_PLACE % json.dumps(what)), bool)
        for kind in ("mousePressed", "mouseReleased"):
            await self.send(
                "Input.dispatchMouseEvent", type=kind, x=place["x"], y=place["y"], button="left", clickCount=1
            )

    async def fill(self, selector: str, text: str) -> None:
        """Put the text into a field, as by typing."""
        await eventually(lambda: self.ask(f"!!document.querySelector({json.dumps(selector)})"), bool)
        await self.ask(
            f"(e => {{ e.focus(); e.select && e.select(); }})(document.querySelector({json.dumps(selector)}))"
        )
        await self.send("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Press a key where the focus is."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        for kind in ("keyDown", "keyUp"):
            await self.send(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_KEYS[key],
                text=text if kind == "keyDown" else "",
            )  # fmt: skip

    async def tab_to(self, what: str) -> None:
        """Go on from one thing to the next by the keyboard, until the expression holds."""
        for _ in range(100):
            if await self.ask(what):
                return
            await self.press("Tab")
        raise AssertionError(f"the keyboard does not lead there: {what}")

    async def hides(self, hidden: bool) -> None:
        """Put another window before this one, or take it away."""
        await self.ask(_HIDDEN % json.dumps(hidden))

    async def picture(self, file: Path) -> None:
        """A picture of the whole page."""
        taken = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        await asyncio.to_thread(file.write_bytes, base64.b64decode(taken["data"]))


_PLACE: Final = """(what => {
  const named = what.startsWith("css=") ? [...document.querySelectorAll(what.slice(4))]
    : [...document.querySelectorAll("a, button, label, summary")].filter(e => e.innerText.trim() === what);
  const seen = named.find(e => e.getClientRects().length);
  if (!seen || document.readyState !== "complete") return null;
  seen.scrollIntoView({ block: "center", inline: "center" });
  const box = seen.getClientRects()[0];
  return { x: box.x + box.width / 2, y: box.y + box.height / 2 };
})(%s)"""
_HIDDEN: Final = """(hidden => {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event("visibilitychange"));
})(%s)"""


def find_chromium() -> str:
    """The browser on the path. Without one the test says loudly that it did not run."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(NOT_RUN)
    return found


@asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Chromium]:
    """A browser, until the block ends."""
    options = (
        "--headless",
        "--no-sandbox",  # it cannot have one where root runs the tests
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        f"--user-data-dir={profile}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
        "--remote-debugging-pipe",
    )
    for_browser, our_writing = os.pipe()
    our_reading, of_browser = os.pipe()

    def give() -> None:
        """It reads from 3 and writes to 4, whatever these were here."""
        ours = os.dup(for_browser), os.dup(of_browser)
        for theirs, descriptor in zip((3, 4), ours, strict=True):
            os.dup2(descriptor, theirs)

    process = await asyncio.create_subprocess_exec(
        *(find_chromium(), *options),
        pass_fds=(3, 4),
        preexec_fn=give,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    os.close(for_browser)
    os.close(of_browser)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=64 << 20)
    listened, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(our_reading, "rb")
    )
    writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, os.fdopen(our_writing, "wb"))
    browser = Chromium(process, reader, writer)
    listening = asyncio.create_task(browser.listen())
    try:
        yield browser
    finally:
        await browser.close()
        await listening
        listened.close()
        await asyncio.sleep(0)  # the loop closes both pipes in its next round
