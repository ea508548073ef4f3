"""Many jobs by each call of a script: claims, and what completes or fails with the claims that follow.

Most of what a call costs the server does not depend on how many jobs it is about.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Final

from workers.errors import StorageError
from workers.storage.bullmq.access import QueueAccess
from workers.storage.bullmq.scripts import Finish, Wanted
from workers.storage.bullmq.server import Reply
from workers.storage.on_redis.errors import checked
from workers.storage.on_redis.node_values import to_ms
from workers.storage.on_redis.wire import Command

JOBS_A_SCRIPT: Final = 100
"""How many jobs one call claims or ends at most; the server serves nobody else meanwhile."""


def new_tokens(worker_id: str) -> str:
    """Return what the tokens of claims that are made together begin with."""
    return f"{worker_id}:{secrets.token_hex(8)}"


def lock_ms(lease: timedelta) -> int:
    """Return how many milliseconds a lock lasts: at least one, because Redis refuses a shorter one."""
    return max(1, to_ms(lease))


class Ride:
    """Claims that travel with settlements: what is wanted, and what has arrived."""

    def __init__(self, worker_id: str, longest: timedelta, limit: int, now_ms: int) -> None:
        self.worker_id = worker_id
        self.wanted = Wanted(count=limit, now_ms=now_ms, tokens=new_tokens(worker_id), lock_ms=lock_ms(longest))
        self.taken: Mapping[str, Reply] = {}
        self.arrived = False

    def arrive(self, replies: Sequence[Reply] | None) -> None:
        """Note what `end` brought; an error of a claim is for the next plain claim to meet."""
        if replies is not None:
            self.taken, failure = claim_answers(self.wanted.tokens, replies)
            self.arrived = failure is None or bool(self.taken)


def claiming(queue: QueueAccess, tokens: str, lasts_ms: int, count: int) -> list[Command]:
    """Return the commands that claim up to `count` jobs; `claim_answers` takes their replies."""
    now_ms = queue.now_ms()
    return [
        queue.lua.claim(tokens, lasts_ms, now_ms, count=min(count - first, JOBS_A_SCRIPT), first=first)
        for first in range(0, count, JOBS_A_SCRIPT)
    ]


def claim_answers(tokens: str, replies: Sequence[Reply]) -> tuple[dict[str, Reply], StorageError | None]:
    """Return the answers of `moveToActive` that have a job, by the token that holds it, and the first error."""
    found: dict[str, Reply] = {}
    failure: StorageError | None = None
    for call, reply in enumerate(replies):
        answers = map(checked, reply) if isinstance(reply, list) else [reply]
        for at, answer in enumerate(answers, call * JOBS_A_SCRIPT):
            if isinstance(answer, StorageError):
                failure = failure or answer
            elif isinstance(answer[0], list):
                found[f"{tokens}{at:x}"] = answer
    return found, failure


async def end(
    queue: QueueAccess, endings: Sequence[Finish | Command], wanted: Wanted | None = None, *more: Command
) -> tuple[list[Reply], list[Reply] | None]:
    """End attempts as these say, and claim what is `wanted` in the step that ends the last of them.

    Returns what BullMQ's scripts answer to each ending, a code or an error in its place, and what `claim_answers`
    takes; None if nothing was claimed, because it takes a look of `guard` before. `more` is run as well.
    """
    finished = [(at, one) for at, one in enumerate(endings) if isinstance(one, Finish)]
    others = [(at, one) for at, one in enumerate(endings) if not isinstance(one, Finish)]
    groups = [finished[first : first + JOBS_A_SCRIPT] for first in range(0, len(finished), JOBS_A_SCRIPT)]
    now_ms = queue.server_ms()
    turns = [queue.lua.turn([one for _, one in group], now_ms) for group in groups[:-1]]
    if groups or wanted is not None:
        turns.append(queue.lua.turn([one for _, one in groups[-1]] if groups else [], now_ms, wanted))
    commands = [*more, *(command for _, command in others), *turns]
    replies = (await queue.server.run(commands, confirmed=True))[len(more) :]
    codes = {at: code for (at, _), code in zip(others, replies, strict=False)}
    turned = replies[len(others) :]
    for group, reply in zip(groups, turned, strict=False):
        codes.update(zip((at for at, _ in group), _answers(reply, len(group)), strict=True))
    tried = wanted is not None and isinstance(turned[-1], list) and turned[-1][2] == 1
    return [codes[at] for at in range(len(endings))], [turned[-1][1]] if tried else None


def _answers(reply: Reply, jobs: int) -> list[Reply]:
    """Return the answers in the reply of a script; an error of all of it counts for each of its jobs."""
    return list(map(checked, reply[0])) if isinstance(reply, list) else [reply] * jobs
