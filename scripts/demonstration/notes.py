"""The same story by ActivityPub: notes to two servers of the fediverse of our own, and to one of Fedify's if it can be.

Fedify comes from npm, with the tests that need it.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from nodes import Node, bare_environment
from screen import Screen
from story import Telling
from tally import Counts, count_notes

from federation import activitypub
from federation.runtime import nodes

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGES = ROOT / "tests" / "interop" / "activitypub"
SERVER = ROOT / "docs" / "examples" / "activitypub" / "server.mjs"
OLDEST_NODE = 22


class NotesStory(Telling):
    """Notes of alice's, for followers on all peers."""

    def __init__(self, sender: Node, *peers: Node, screen: Screen) -> None:
        super().__init__(sender, peers, screen=screen)
        self._alice = f"{sender.url}/users/alice"
        self._followers = [
            activitypub.Recipient(
                id=f"{peer.url}/users/bob", inbox=f"{peer.url}/users/bob/inbox", shared_inbox=f"{peer.url}/inbox"
            )
            for peer in peers
        ]
        self._notes: dict[str, str] = {}

    async def begin(self) -> None:
        """Make alice an actor with keys."""
        nodes.adopt(self.federation)  # what applications call finds it there
        self.screen.note("alice becomes an actor of the sender, with keys; the peers will fetch them from there")
        async with self.federation.outbox.transaction() as session:
            await activitypub.add_actor(session, self._alice)

    async def publish(self, number: int) -> None:
        """Send a note to all followers."""
        text = f"note number {number}"
        note = {
            "@context": "https://www.w3.org/ns/activitystreams",
            "id": f"{self._alice}/notes/{number}",
            "type": "Note",
            "attributedTo": self._alice,
            "to": [activitypub.PUBLIC],
            "content": text,
        }
        async with self.federation.outbox.transaction() as session:
            sent = await activitypub.send(session, activitypub.create(note), self._followers)
        self.owed.update(sent.delivery_ids)
        self._notes[sent.activity_id] = text

    def count(self) -> Counts:
        """Count at the sender, and what the peers show."""
        return count_notes(self.sender, self.peers, self._notes)


def make_inbox(name: str, *, directory: Path, port: int) -> Node:
    """Make a server of ours with a shared inbox, not yet running."""
    return _server(name, directory, port, program=(sys.executable, str(HERE / "inbox.py")))


def make_fedify(name: str, *, directory: Path, port: int) -> Node | None:
    """Make a server of Fedify's, not yet running. Where there cannot be one, say why, and return None."""
    node, problem = _node_with_fedify()
    if node is None:
        print(f"Without a server of Fedify's: {problem}.", file=sys.stderr)
        return None
    made = _server(name, directory, port, program=(node, SERVER.name))
    shutil.copy(SERVER, directory)
    (directory / "node_modules").symlink_to(PACKAGES / "node_modules")
    return made


def _node_with_fedify() -> tuple[str | None, str]:
    """Return the path of a Node that is new enough, or None and what is missing. Get Fedify from npm if need be."""
    if shutil.which("npm") is None:
        return None, "there is no npm"
    if not (PACKAGES / "node_modules" / ".package-lock.json").exists():
        print("Getting Fedify from npm (the first time takes a minute) ...", file=sys.stderr)
        command = ["npm", "ci", "--silent"]
        if subprocess.run(command, cwd=PACKAGES, stdout=sys.stderr, check=False).returncode:
            return None, "npm did not get it"
    found = (str(PACKAGES / "node_modules" / ".bin" / "node"), shutil.which("node"))
    node = next((path for path in found if path and _is_new_enough(path)), None)
    return node, f"it needs Node {OLDEST_NODE} or newer"


def _is_new_enough(node: str) -> bool:
    try:
        told = subprocess.run([node, "--print", "process.versions.node"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return int(told.stdout.partition(".")[0]) >= OLDEST_NODE


def _server(name: str, directory: Path, port: int, *, program: Sequence[str]) -> Node:
    directory.mkdir()
    made = Node(
        name=name,
        url=f"http://127.0.0.1:{port}",
        environment=bare_environment(directory),
        command=[str(port)],
        directory=directory,
        answers_at="/",
        program=program,
    )
    made.log_path.touch()
    return made
