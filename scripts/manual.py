"""Runs the manual, like a reader who types what it shows.

    python scripts/manual.py [PAGE ...]

Every block of Python in a README, and in what operators and applications read, is run as it stands, in the order of
its page, in a process that must end with 0 and print nothing on stderr; on a page of questions and answers, the
questions are asked. What the pages about a node show for a shell is typed there, an operator's day on other ports. Each
page has a folder of its own, with a node in it if its programs need one. Needs what the pages use: the extras
`metrics`, `node`, `otel` and `redis`. What needs Spark is left out: `tests/federation/analytics` runs it.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

ROOT: Final = Path(__file__).resolve().parent.parent
FOLDERS: Final = ("db", "docs", "federation", "workers")
SPARK: Final = "federation/analytics/README.md"
ABOUT_A_NODE: Final = ("docs/embed/", "docs/operate/", "docs/understand/")
"""The folders of the manual of the application. Their programs and commands need a node."""
ALICE: Final = "http://127.0.0.1:8451/users/alice"
BOB: Final = "http://127.0.0.1:9/users/bob"
ARGUMENTS: Final = {"README.md": (ALICE, BOB, f"{BOB}/inbox", "hello, fediverse")}
"""The arguments of a page's program, as its first line says."""
PORTS: Final = ("8451", "8452")
"""The port of the node of the operator's day, and that of its peer, where nobody listens."""
CERTAIN: Final = ("federation init ", "federation users add ")
"""Commands that print the same on every fresh node."""
WORKERS: Final = 3
"""The number of workers of a node without tasks of an application; when all are ready, it listens."""
SECONDS: Final = 120
LASTING: Final = "app.run()\n"
"""How a program ends that works until Ctrl-C."""

HEADING_OR_FENCE: Final = re.compile(
    r"^#+ (?P<title>[^\n]+)$|^```(?P<language>\w*)\n(?P<code>.*?)^```$|^(?P<indented>(?:    [^\n]*\n+)+)", re.S | re.M
)


class Untrue(Exception):
    """The manual shows something that is not so; the message says where, and what is."""


@dataclass(frozen=True, slots=True)
class Block:
    """Something that a page shows to be typed. An indented block is for the shell, and has no language."""

    page: str
    title: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def main() -> None:
    """Run the pages. At the first block that does not do what is shown, end with 1 and the reason."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "page", nargs="*", default=readmes(), help="by its path in the repository (default: every README)"
    )
    try:
        for page in parser.parse_args().page:
            with tempfile.TemporaryDirectory(prefix="federation-manual-") as folder:
                run(page, Path(folder))
    except Untrue as untrue:
        sys.exit(f"manual: {untrue}")
    except KeyboardInterrupt:
        sys.exit(130)


def pages() -> list[str]:
    """Return every page, by its path in the repository."""
    found = [*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)


def readmes() -> list[str]:
    """Return the pages that are run. The others have tests of their own, of what their programs print."""
    return [page for page in pages() if page.endswith("README.md") or page.startswith(ABOUT_A_NODE)]


def blocks(page: str) -> list[Block]:
    """Return what the page shows, in its order."""
    text, title, found = (ROOT / page).read_text(), "", list[Block]()
    for match in HEADING_OR_FENCE.finditer(text):
        title = match["title"] or title
        shown = match["code"] or match["indented"]
        if shown:
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page, title, line, match["language"] or "", shown))
    return found


def run(page: str, folder: Path) -> None:
    """Run what the page shows, beginning in `folder`."""
    shown = [block for block in blocks(page) if block.language == "python" or is_typed(block)]
    if page == SPARK:
        say(f"{page} is left out, as it needs Spark")
    elif any(block.text.startswith(">>> ") for block in shown):
        command([sys.executable, "-m", "doctest", str(ROOT / page)], folder, page)
        say(f"{page}: {len(shown)} blocks of questions and answers")
    elif shown:
        needs_node = page == "README.md" or page.startswith(ABOUT_A_NODE)
        with Reader(make_node(folder / "node") if needs_node else folder) as reader:
            for block in shown:
                (reader.type if is_typed(block) else reader.program)(block)
        say(f"{page}: {len(shown)} blocks")


def is_typed(block: Block) -> bool:
    return block.page.startswith(ABOUT_A_NODE) and not block.language and "federation " in block.text


def make_node(node: Path) -> Path:
    """Make a node with a user, as the README does."""
    node.mkdir()
    command(["federation", "init", "--url", f"http://127.0.0.1:{PORTS[0]}"], node, "init")
    command(["federation", "users", "add", "alice"], node, "users add")
    with (node / ".env").open("a") as settings:
        settings.write("FEDERATION_ACTIVITYPUB=true\n")
    return node


class Reader:
    """Does in a folder what a page shows. What it started there has ended with its block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._instead = dict(zip(PORTS, free_ports(len(PORTS)), strict=True)) | {"/var/backups": "."}
        self._running: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._running:
            end(process)

    def program(self, block: Block) -> None:
        """Run it in a separate process, from the file that its first line names, if it names one."""
        named = re.match(r"# (\w+\.py)\n", block.text)
        if named:
            (self._folder / named[1]).write_text(block.text)
        code = [named[1]] if named else ["-c", block.text]
        arguments = [sys.executable, "-W", "error", *code, *ARGUMENTS.get(block.page, ())]
        if block.text.endswith(LASTING):
            self._interrupt(arguments, block)
            return
        told = command(arguments, self._folder, str(block))
        if told.stderr and "basicConfig" not in block.text:  # one program is about what is logged there
            raise Untrue(f"{block} says on stderr{quoted(told.stderr)}")

    def _interrupt(self, arguments: Sequence[str], block: Block) -> None:
        """Run what works until Ctrl-C, and press that once it has printed something; it logs, and warns of nothing."""
        log, printed = self._folder / "log", self._folder / "printed"
        with log.open("w") as errors, printed.open("w") as output:
            process = begin([*arguments[:1], "-u", *arguments[1:]], self._folder, stdout=output, stderr=errors)
        self._running.append(process)
        deadline = time.monotonic() + SECONDS
        while not printed.read_text() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        status, told = process.wait(SECONDS), log.read_text()
        if status or re.search(r"^(?!\S+ \S+ INFO )", told.rstrip("\n"), re.M):
            raise Untrue(f"{block} ends with status {status}, and says{quoted(told)}")

    def type(self, block: Block) -> None:
        """Type each command.

        It succeeds, or finds nothing to do: what is shown of other servers does not exist here.
        """
        for line, shown in self._transcript(block.text):
            if line.startswith("federation init"):
                self._folder = self._folder.with_name("fresh")
                self._folder.mkdir()
            if line.endswith(("run", " &")):
                self._start(line)
                continue
            told = command(["sh", "-c", line], self._folder, f"{block}, `{line}`,", statuses=(0, 1))
            if line.startswith(CERTAIN):
                compare(block, shown, told.stdout + told.stderr)
            elif line == "federation doctor":
                compare(block, sights(shown), sights(told.stdout))

    def _transcript(self, text: str) -> Iterator[tuple[str, str]]:
        """Yield each command with what it printed. If no line begins with `$`, all lines are commands."""
        for shown, instead in self._instead.items():
            text = text.replace(shown, instead)
        plain = re.sub("^    ", "", text, flags=re.M).strip()
        for part in plain.removeprefix("$ ").split("\n$ ") if plain.startswith("$ ") else plain.splitlines():
            line, _, told = part.partition("\n")
            yield line, told + "\n"

    def _start(self, line: str) -> None:
        """Start it: in the foreground until it works, in the background for as long as there is more to type."""
        log = self._folder / "log"
        with log.open("w") as file:
            process = begin(["sh", "-c", f"exec env {line.removesuffix(' &')}"], self._folder, stderr=file)
        self._running.append(process)
        deadline = time.monotonic() + SECONDS
        while (told := log.read_text()).count('"worker_ready"') < WORKERS:
            if process.poll() is not None or time.monotonic() > deadline:
                raise Untrue(f"`{line}` does not work{quoted(told)}")
            time.sleep(0.1)
        if not line.endswith(" &"):
            process.terminate()
            if process.wait(SECONDS):
                raise Untrue(f"`{line}` ends with status {process.returncode}{quoted(log.read_text())}")


def sights(told: str) -> str:
    """Return what the doctor examined, without its verdicts: recurring jobs have not run yet.

    The open files are left out, too, as they are mentioned only where this machine allows few.
    """
    lines = [line.split() for line in told.splitlines() if not line.startswith(" ")]
    return "".join(f"{words[1]}\n" for words in lines if words[1] != "open")


def compare(block: Block, shown: str, told: str) -> None:
    if shown != told:
        raise Untrue(f"{block} shows{quoted(shown)}\nand that is{quoted(told)}")


def command(
    arguments: Sequence[str], folder: Path, what: str, *, statuses: Sequence[int] = (0,)
) -> subprocess.CompletedProcess[str]:
    """Run it until it ends with one of these statuses."""
    process = begin(arguments, folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        stdout, stderr = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise Untrue(f"{what} does not end within {SECONDS} s") from None
    finally:
        end(process)
    if process.returncode not in statuses:
        raise Untrue(f"{what} ends with status {process.returncode}{quoted(stdout + stderr)}")
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def begin(arguments: Sequence[str], folder: Path, **streams: int) -> subprocess.Popen[str]:
    """Start it without any settings of this machine.

    It only has the `federation` beside this Python, and the PYTHONPATH.
    """
    kept = {name: os.environ[name] for name in ("PYTHONPATH", "JAVA_HOME") if name in os.environ}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.Popen(
        arguments,
        cwd=folder,
        env={**kept, "PATH": path, "LANG": "C.UTF-8", "COLUMNS": "200"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        text=True,
        **streams,
    )


def end(process: subprocess.Popen[str]) -> None:
    """Stop it, and everything that it started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(SECONDS)


def free_ports(count: int) -> list[str]:
    """Return ports on which nobody listens, all of them different."""
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [str(server.getsockname()[1]) for server in servers]
    for server in servers:
        server.close()
    return ports


def quoted(text: str) -> str:
    return "".join(f"\n  {line}" for line in text.splitlines()[-30:])


def say(what: str) -> None:
    print(f"manual: {what}", flush=True)


if __name__ == "__main__":
    main()
