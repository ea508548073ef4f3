"""What an administrator does with this node's own keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from sqlalchemy import func, select

from db import Server
from federation.activitypub.actors import reseal_all
from federation.base.audit import Order, recorded
from federation.base.errors import ConfigurationError
from federation.base.own_keys import begin_rotation, drop_old_pair
from federation.base.settings.settings import KEY_VARIABLES, OLD_KEY_VARIABLES
from federation.sealed.peers.key_rotation import KeyRotation, Waiting

if TYPE_CHECKING:
    from federation.runtime.composition import Federation

Progress: TypeAlias = Callable[[int, str], AbstractContextManager[Callable[[int], None]]]
"""Shows progress: called with how many things there are, and what they are called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotationState:
    """How many servers know the newest keys, and which do not.

    `old_kept` says that there are old keys beside them; `restart_needed` that the keys come from the environment, which
    no process reads again.
    """

    confirmed: int
    waiting: Sequence[Waiting]
    old_kept: bool
    restart_needed: bool


async def waiting(federation: Federation) -> list[Waiting]:
    """Return the servers that need the old keys. Without old keys there are none."""
    rotation = _rotation(federation)
    return await rotation.waiting() if rotation.is_under_way else []


async def rotate(
    federation: Federation, *, only: str | None, progress: Progress, order: Order | None = None
) -> RotationState:
    """Make new keys if there are none yet, and ask servers to accept them.

    All servers are asked that do not know them, or *only* that one.

    Raises:
        ConfigurationError: they cannot be written where the old ones come from.
    """
    rotation = _rotation(federation)
    async with recorded(federation.database, order) as record:
        if not rotation.is_under_way:
            await rotation.prepare()
            _begin(federation)
        await reseal_all(federation.database, federation.keys)
        urls = [each.url for each in await rotation.waiting() if only in (None, each.url)]
        with progress(len(urls), "servers") as done:
            asked = await rotation.ask(urls, lambda _: done(1))
        confirmed = sum(each.problem is None for each in asked)
        await federation.database.transact(lambda connection: record.add(connection, confirmed))
    return await _state(federation, rotation)


async def forget_old(federation: Federation, *, order: Order | None = None) -> RotationState:
    """Delete the old keys, and note that every server knows the new ones.

    Raises:
        ConfigurationError: the old keys are not in a file of this node.
    """
    rotation = _rotation(federation)
    file = federation.settings.key_file()
    if file is None and rotation.is_under_way:
        raise ConfigurationError([f"{name}: unset it, and restart every process" for name in OLD_KEY_VARIABLES])
    async with recorded(federation.database, order):
        await reseal_all(federation.database, federation.keys)
        await _forget(rotation, file)
    return await _state(federation, rotation)


async def _forget(rotation: KeyRotation, file: Path | None) -> None:
    if file is not None:
        try:
            drop_old_pair(file)
        except OSError as error:
            raise ConfigurationError([f"{file}: cannot be written: {error.strerror}"]) from None
    await rotation.forget_old(rotation.newest)


def _begin(federation: Federation) -> None:
    file = federation.settings.key_file()
    if file is None:
        raise ConfigurationError(
            [f"{new}: set in the environment: give it a new value by `keys generate`, and {old} the one it had; restart"
             " every process, and run this again"
             for new, old in zip(KEY_VARIABLES, OLD_KEY_VARIABLES, strict=True)]
        )  # fmt: skip
    try:
        begin_rotation(file)
    except OSError as error:
        raise ConfigurationError([f"{file}: cannot be written: {error.strerror}"]) from None


def _rotation(federation: Federation) -> KeyRotation:
    rotation = federation.key_rotation
    if rotation is None:
        federation.settings.require_identity()
        raise AssertionError("a node with a name and keys has a rotation")
    return rotation


async def _state(federation: Federation, rotation: KeyRotation) -> RotationState:
    async with federation.database.read() as session:
        number = int((await session.execute(select(func.count()).select_from(Server))).scalar_one())
    under_way = rotation.is_under_way
    left = await rotation.waiting() if under_way else []
    return RotationState(
        confirmed=number - len(left),
        waiting=left,
        old_kept=under_way,
        restart_needed=federation.settings.key_file() is None,
    )
