"""A process that runs while the node's keys change: it has them at once, or is said to need a restart."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import httpx

from federation.protocol.relaying import ORIGIN_HEADER
from tests.acceptance.test_fresh_node import FreshNode, initialised
from tests.acceptance.test_rotation import keys_of
from tests.federation.protocol.vectors import B
from tests.patience import eventually

PEER: Final = "http://127.0.0.1:9"


async def shown(node: FreshNode) -> str:
    """The signing key that the running process shows to the peer."""
    async with httpx.AsyncClient() as client:
        response = await client.get(f"{node.url}/discover", headers={ORIGIN_HEADER: PEER})
    return str(response.json()["publicKey"])


async def know_peer(node: FreshNode, *, by: str) -> None:
    """The peer is registered, and knows the node by this key."""
    async with node.view() as view:
        await view.registry.register(
            url=PEER,
            public_key=B.env["FEDERATION_PUBLIC_KEY"],
            encryption_public_key=B.env["FEDERATION_ENCRYPTION_PUBLIC_KEY"],
        )
        await view.registry.note_knows(PEER, by)


async def test_new_keys_need_no_restart_where_they_are_in_the_file(tmp_path: Path) -> None:
    """And where they are in the environment of the process, whoever looks is told that it needs one."""
    async with initialised(tmp_path) as node:
        old = node.folder.settings().own_keys()
        assert old is not None
        running = await node.start()
        await node.command("keys", "rotate")
        newest = await keys_of(node)
        assert newest != old.signing.public_text
        await know_peer(node, by=newest)
        await eventually(partial(shown, node), lambda found: found == newest)
        await eventually(node.doctor, lambda found: found["peer keys"]["verdict"] == "ok")  # its peer may be too slow
        running.process.terminate()
        await running.ended()

        running = await node.start(**old.to_env())  # as a service manager's own settings do
        assert await shown(node) == old.signing.public_text
        finding = (await node.doctor())["peer keys"]
        assert (finding["verdict"], "restart every process" in finding["advice"]) == ("failure", True), finding
        await running.until_logged("own_keys_missing")
