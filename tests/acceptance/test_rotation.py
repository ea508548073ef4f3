"""A node changes its keys while posts go both ways, and `kill -9` takes either side at each of the steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
from sqlalchemy import select
from sqlmodel import col

from db import Post, Server
from federation.base.queues.job_data import POST_JOB
from federation.node.posts import POSTS_PATH
from federation.runtime.composition import Federation
from tests.acceptance.site import post
from tests.acceptance.test_fresh_node import FreshNode, initialised
from tests.federation.test_run import Command
from tests.patience import eventually
from tests.workers.manual import ROOT

# The process that has DIES="after confirm" in its environment is killed when that step of it is done.
SITE: Final = """
import os, signal

when, _, step = os.environ.get("DIES", "").partition(" ")

def dying(cls, method, name):
    call = getattr(cls, method)

    async def dies(self, *arguments, **named):
        is_it = step and step == (name or str(arguments[1]).rpartition("/")[2])
        if is_it and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = await call(self, *arguments, **named)
        if is_it and when == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(cls, method, dies)

if step:
    from federation.node.rotation import RotationConfirm, RotationStart
    from federation.sealed.peers.key_rotation import KeyRotation
    from federation.sealed.peers.registry import Registry

    dying(KeyRotation, "_post", None)
    dying(Registry, "note_knows", "note")
    dying(RotationStart, "__call__", "init")
    dying(RotationConfirm, "__call__", "confirm")
"""
STEPS: Final = [
    *((0, step) for step in ("before init", "after init", "before confirm", "after confirm", "after note")),
    *((1, step) for step in ("before init", "after init", "before confirm", "after confirm")),
]
SHORT: Final = {"FEDERATION_DELIVERY_BACKOFF": "200ms", "PYTHONWARNINGS": "default"}
POSTS: Final = 5


@pytest.mark.full
@pytest.mark.timeout(1200)
async def test_a_rotation_survives_kill_at_each_step_of_either_side(tmp_path: Path) -> None:
    """Each time another run ends it with the same keys, and every post arrives."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    settings = {**SHORT, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    async with initialised(tmp_path / "a", **settings) as a, initialised(tmp_path / "b", **settings) as b:
        await a.start()
        running = await b.start()
        for node, other in ((a, b), (b, a)):
            await node.command("servers", "discover", other.url)
        for number, (side, step) in enumerate(STEPS):
            running = await restarted(b, running, dies=step if side == 1 else "")
            await owe(a, b, f"before-{number}")
            await interrupted(a, dies=step if side == 0 else "")
            begun = await keys_of(a)
            running = await restarted(b, running)
            state = await rotate(a)
            assert (await keys_of(a), state["waiting"]) == (begun, []), (side, step)
            assert await known_key(b, a) == begun, (side, step)
            await owe(a, b, f"after-{number}")
            await a.command("keys", "rotate", "--forget-old", "--yes")
        for node in (a, b):
            await node.command("deliveries", "release", "--all")
        owed = [
            f"{when}-{n}-{each}" for when in ("before", "after") for n in range(len(STEPS)) for each in range(POSTS)
        ]
        for node in (a, b):
            async with node.view() as view:
                await eventually(partial(arrived, view), lambda found: found == sorted(owed))


async def restarted(node: FreshNode, running: Command, *, dies: str = "") -> Command:
    """The node runs, and was killed if it had not been already."""
    if running.process.returncode is None:
        running.process.kill()
    await running.ended()
    return await node.start(DIES=dies)


async def interrupted(a: FreshNode, *, dies: str) -> None:
    status, stdout, stderr = await a.run("keys", "rotate", "--json", DIES=dies)
    assert status == (-9 if dies else 1), stdout + stderr


async def rotate(a: FreshNode) -> dict[str, Any]:
    status, stdout, stderr = await a.run("keys", "rotate", "--json")
    assert status == 0, stdout + stderr
    state: dict[str, Any] = json.loads(stdout)
    return state


async def keys_of(node: FreshNode) -> str:
    return str(json.loads(await node.command("keys", "show", "--json"))["FEDERATION_PUBLIC_KEY"])


async def known_key(node: FreshNode, of: FreshNode) -> str:
    async with node.view() as view, view.database.read() as session:
        return (await session.execute(select(col(Server.public_key)).where(col(Server.url) == of.url))).scalar_one()


async def owe(a: FreshNode, b: FreshNode, name: str) -> None:
    """Some posts are owed both ways."""
    for sender, receiver in ((a, b), (b, a)):
        async with sender.view() as view, view.outbox.transaction() as session:
            for number in range(POSTS):
                text = post(sender.url, f"{name}-{number}")
                await view.outbox.enqueue_delivery(session, POST_JOB, receiver.url + POSTS_PATH, receiver.url, text)


async def arrived(view: Federation) -> Sequence[str]:
    async with view.database.read() as session:
        found = (await session.execute(select(col(Post.federation_post_id)))).scalars()
        return sorted(each for each in found if each is not None)
