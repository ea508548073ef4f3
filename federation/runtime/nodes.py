"""The nodes of a process: one for each event loop that asks, and one for synchronous code."""

from __future__ import annotations

import gc
import os
import resource
import sys
import threading
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Final

from federation.base.settings.settings import Settings
from federation.http.pool import pool_limits
from federation.runtime.composition import Federation
from workers.background import background
from workers.homes import AtLoopEnd, Home, keep_inherited

COLLECT_AFTER: Final = 10_000
"""How many new objects start a garbage collection; CPython's 700 to 2 000 are a few deliveries."""

SPARE_DESCRIPTORS: Final = 200
"""For databases, queues, inbound connections, logs and the interpreter; connections to servers come on top."""


@dataclass(slots=True, eq=False)
class _Node:
    """A node of this process, and the event loop that its connections belong to.

    The loop is None until one asks for the node.
    """

    federation: Federation
    home: Home | None
    adopted: bool = False
    at_loop_end: AtLoopEnd | None = None


class _NodeProcess:
    """The state of this process; the functions below write it, under the lock."""

    lock = threading.Lock()
    nodes: ClassVar[list[_Node]] = []


def get_federation() -> Federation:
    """Return the node of the running event loop, made from the environment on first use.

    Without a loop, return the node of any. Each loop has a node of its own, as connections cannot leave their loop; it
    is closed when the loop is shut down.

    Raises:
        ConfigurationError: lists every malformed setting.
        NoNodeHere: nothing here describes a node.
    """
    here = _here()
    with _NodeProcess.lock:
        _drop_gone()
        node = _found(here)
        if node is None:
            node = _Node(_made(), here)
            _NodeProcess.nodes.append(node)
        if node.home is None or node.at_loop_end is None:
            _settle(node, here)
        return node.federation


def adopt(federation: Federation) -> None:
    """Make `federation` this process's node, so that the application's tasks use the same node that runs them."""
    here = _here()
    with _NodeProcess.lock:
        _drop_gone()
        _NodeProcess.nodes = [node for node in _NodeProcess.nodes if _apart(node, here)]
        _NodeProcess.nodes.append(_Node(federation, here, adopted=True))


def release() -> Federation | None:
    """Take the node away from the running event loop, and return it; the caller has to close it."""
    here = _here()
    with _NodeProcess.lock:
        _drop_gone()
        node = _found(here)
        if node is not None:
            _NodeProcess.nodes.remove(node)
    return None if node is None else node.federation


def has_nodes() -> bool:
    """Tell whether this process has a node, in whatever loop."""
    with _NodeProcess.lock:
        _drop_gone()
        return bool(_NodeProcess.nodes)


def release_all() -> list[tuple[Federation, Home | None]]:
    """Take all nodes away, and return each with its loop, in which the caller has to close it."""
    with _NodeProcess.lock:
        _drop_gone()
        nodes, _NodeProcess.nodes = _NodeProcess.nodes, []
    return [(node.federation, node.home) for node in nodes]


def background_node() -> Federation:
    """Return the node for synchronous code, in the background loop.

    It is made on first use, and closed at the process's end.

    Raises:
        ConfigurationError: lists every malformed setting.
        NoNodeHere: nothing here describes a node.
    """
    return background.run(_node_of_background)


def close_background_node() -> None:
    """Close the node for synchronous code, if there is one. Its next use makes another."""
    with _NodeProcess.lock:
        has_one = any(node.home is not None and node.home.loop is background.loop for node in _NodeProcess.nodes)
    if has_one:
        background.run(_close_here)


async def _node_of_background() -> Federation:
    background.at_end("federation", _close_here)
    return get_federation()


async def _close_here() -> None:
    background.at_end("federation", None)
    federation = release()
    if federation is not None:
        await federation.close()


def _settle(node: _Node, here: Home | None) -> None:
    """Assign the node to this loop from now on, and close it with the loop, unless somebody else owns it."""
    node.home = node.home or here
    if here is not None and not node.adopted and here.loop is not background.loop:
        node.at_loop_end = AtLoopEnd(partial(_close_with_loop, node))


async def _close_with_loop(node: _Node) -> None:
    with _NodeProcess.lock:
        if node not in _NodeProcess.nodes:
            return
        _NodeProcess.nodes.remove(node)
    await node.federation.close()


def _here() -> Home | None:
    try:
        return Home.here()
    except RuntimeError:  # synchronous code
        return None


def _apart(node: _Node, here: Home | None) -> bool:
    return node.home is not None and (here is None or node.home.loop is not here.loop)


def _found(here: Home | None) -> _Node | None:
    """Return the loop's node, or else one that belongs to no loop yet; for synchronous code any, the youngest first."""
    young = _NodeProcess.nodes[::-1]
    if here is None:
        young.sort(key=lambda node: node.home is not None and node.home.loop is background.loop)
        return young[0] if young else None
    own = next((node for node in young if node.home is not None and node.home.loop is here.loop), None)
    if own is not None or here.loop is background.loop:
        return own
    return next((node for node in young if node.home is None), None)


def _made() -> Federation:
    """Make a node like the one that this process runs, or else the environment's."""
    adopted = next((node.federation for node in _NodeProcess.nodes if node.adopted), None)
    if adopted is not None:
        return adopted.another()
    settings = Settings.load()
    settings.require_database()  # a queue that finds no file would tell how one without a node is made
    return Federation(settings)


def _drop_gone() -> None:
    _NodeProcess.nodes = [node for node in _NodeProcess.nodes if node.home is None or not node.home.is_gone]


def _forget() -> None:
    """Forget all nodes in a fork's child: they are the parent's."""
    _NodeProcess.lock = threading.Lock()  # another thread may have held it at the fork
    keep_inherited(_NodeProcess.nodes)
    _NodeProcess.nodes = []


os.register_at_fork(after_in_child=_forget)


def set_aside_loaded() -> None:
    """Exclude what the process holds now, mainly its code, from garbage collections, and make these rarer.

    It is not searched for garbage first: that took 0.15 s of a worker's start, and found 1 300 of 139 000 objects.
    """
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, *gc.get_threshold()[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Descriptors:
    """How many open files a node needs at most, with all its slots and all its room taken, and how many it may have."""

    needed: int
    allowed: int

    @property
    def advice(self) -> str | None:
        """What to do if they are too few; None if they suffice."""
        if self.allowed >= self.needed:
            return None
        raised = f"raise the hard limit of open files to {self.needed} (`LimitNOFILE=`, `ulimit -Hn`)"
        return f"{raised}, or lower FEDERATION_OVERTIME"


def descriptors(settings: Settings) -> Descriptors:
    """Return the descriptors of a process started like this one, once `allow_descriptors` has done what it can."""
    return Descriptors(needed=_needed(settings), allowed=_or_endless(resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


def allow_descriptors(settings: Settings) -> Descriptors:
    """Raise the soft limit of open files to what the node needs, or to the hard limit. It is never lowered."""
    needed = _needed(settings)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if _or_endless(soft) < needed:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, _or_endless(hard)), hard))
        except (OSError, ValueError):  # macOS has another limit in addition, and says "unlimited" here
            return Descriptors(needed=needed, allowed=soft)
    return Descriptors(needed=needed, allowed=_or_endless(resource.getrlimit(resource.RLIMIT_NOFILE)[0]))


def _needed(settings: Settings) -> int:
    limits = pool_limits(settings)
    return limits.connections + limits.idle_servers + SPARE_DESCRIPTORS


def _or_endless(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
