"""Three nodes on this machine, a follow that is accepted, one that waits, 400 posts, and an outage in the middle.

Starts one sender and two peers as processes of their own on loopback ports, each with its own SQLite database and keys,
then plays an application: everything it asks for must arrive at the peers exactly once, although one of them is down
for a while. Stays up until Ctrl-C, so that you can look around; nothing is left behind afterwards.

With --activitypub the peers are servers of the fediverse: two small ones of ours, and one of Fedify's if there is npm.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from nodes import DemoFailed, Node, dashboard_of, embedded_valkey, free_ports, make_node
from notes import NotesStory, make_fedify, make_inbox
from screen import Screen
from story import Story, settle_in
from tally import Counts

PROMISED = {"failed": 0, "lost": 0, "duplicates": 0}
FOLLOWED = {"follows_accepted": 1, "follows_acknowledged": 1}
INBOXES = ("bobs-server", "carols-server")
AT_LEAST_ONE = ("retried", "probes")
"""Of those that a story counts."""


def main() -> int:
    """Run the demonstration. Return 0 if everything came out as promised."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--once", action="store_true", help="end by itself when everything has arrived")
    parser.add_argument("--json", action="store_true", help="print the numbers as one JSON object on stdout")
    parser.add_argument("--activitypub", action="store_true", help="notes to servers of the fediverse, one of Fedify's")
    parser.add_argument("--dashboard", action="store_true", help="show the sender in the browser, too")
    storage = parser.add_mutually_exclusive_group()
    storage.add_argument("--queue", metavar="URL", help="keep the sender's queues there, as QUEUE_URL does")
    storage.add_argument(
        "--bullmq", action="store_true", help="keep the sender's queues in BullMQ on an embedded Valkey"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds the stack, so that everything is stopped
    try:
        return demonstrate(options)
    except DemoFailed as error:
        print(f"scripts/demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def demonstrate(options: argparse.Namespace) -> int:
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="federation-demo-")))
        settings = {"QUEUE_URL": options.queue} if options.queue else {}
        if options.bullmq:
            settings = {"REDIS_URL": stack.enter_context(embedded_valkey())}
        nodes = (make_servers if options.activitypub else make_nodes)(directory, settings)
        sender, *peers = nodes
        for node in nodes:
            stack.callback(node.stop)
            node.start()
        screen = stack.enter_context(Screen(sender, peers))
        if options.dashboard:
            dashboard = dashboard_of(sender)
            stack.callback(dashboard.stop)
            dashboard.start()
            screen.note(f"the sender's dashboard is at {dashboard.url}")
            nodes.append(dashboard)
        story = (NotesStory if options.activitypub else Story)(sender, *peers, screen=screen)
        tally = asyncio.run(story.tell())
        seconds = round(time.monotonic() - started, 1)
        problems = deviations(tally, delivered=len(story.owed))
        screen.summary(tally, problems)
        if options.json:
            scheme = options.queue.partition("://")[0] if options.queue else "bullmq" if options.bullmq else "sqlite"
            told = {"peers": len(peers)} if options.activitypub else {}
            print(json.dumps({**asdict(tally), **told, "storage": scheme, "seconds": seconds}), flush=True)
        if not options.once:
            stay(nodes)
    return 1 if problems else 0


def make_nodes(directory: Path, sender_settings: dict[str, str]) -> list[Node]:
    """Make the sender and its two peers, with their users, not yet running."""
    run = secrets.token_hex(4)
    roles = [
        ("sender", ["run"], sender_settings, [("alice", False)]),
        ("bobs-node", ["node", "serve"], {}, [("bob", False)]),
        ("carols-node", ["node", "serve"], {}, [("carol", True), ("dave", False)]),
    ]
    nodes = []
    for (name, command, settings, users), port in zip(roles, free_ports(len(roles)), strict=True):
        node = make_node(name, directory=directory / name, port=port, run=run, command=command, settings=settings)
        asyncio.run(settle_in(node, *users))
        nodes.append(node)
    return nodes


def make_servers(directory: Path, sender_settings: dict[str, str]) -> list[Node]:
    """Make the sender and servers of the fediverse, not yet running; one of Fedify's if it can be."""
    port, fedifys, *ports = free_ports(4)
    settings = {"FEDERATION_ACTIVITYPUB": "1", **sender_settings}
    run, folder = secrets.token_hex(4), directory / "sender"
    sender = make_node("sender", directory=folder, port=port, run=run, command=["run"], settings=settings)
    asyncio.run(settle_in(sender, ("alice", False)))
    fedify = make_fedify("fedify", directory=directory / "fedify", port=fedifys)
    inboxes = [make_inbox(name, directory=directory / name, port=ports.pop()) for name in INBOXES]
    return [sender, *([fedify] if fedify else []), *inboxes]


def deviations(tally: Counts, *, delivered: int) -> list[str]:
    """Return what did not come out as promised."""
    numbers = asdict(tally)
    expected = {"delivered": delivered, **PROMISED, **{name: FOLLOWED[name] for name in FOLLOWED if name in numbers}}
    wrong = [f"{name} is {numbers[name]}, not {value}" for name, value in expected.items() if numbers[name] != value]
    return wrong + [f"{name} is 0, not at least 1" for name in AT_LEAST_ONE if numbers.get(name) == 0]


def stay(nodes: list[Node]) -> None:
    """Keep the nodes up until Ctrl-C."""
    print("\nThe nodes stay up until Ctrl-C; look around:", file=sys.stderr)
    for node in nodes:
        look = f"curl {node.url}{node.answers_at}" if node.answers_at in ("/", "/discover") else node.url
        print(f"  {node.name}: {look}", file=sys.stderr)
        print(f"  {' ' * len(node.name)}  log: {node.log_path}", file=sys.stderr)
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


if __name__ == "__main__":
    sys.exit(main())
