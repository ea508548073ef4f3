"""Whose a queue is: several libraries keep theirs under the same keys, each in a layout of its own.

Theory of operation. Who works on a queue of another layout breaks it for its own workers, so a storage looks before it
writes, and now and then later, because a queue that was empty may have become another library's. The look itself is a
script of the layout, which fails with the code FOREIGN. While the queue is another's, nothing is asked of it but that.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Final

from workers.clock import monotonic
from workers.errors import ForeignQueue
from workers.storage.on_redis.wire import Reply

LOOK_SECONDS: Final = 10.0
"""How often a queue is looked at, at most."""

_LOG: Final = logging.getLogger(__name__)


class Ownership:
    """Whether a queue is another library's: `look` answers what speaks for that, and raises what proves it."""

    def __init__(self, look: Callable[[], Awaitable[Reply]]) -> None:
        self._look = look
        self._looked_at = float("-inf")
        self._refusal: str | None = None
        self._told = False

    @property
    def is_foreign(self) -> bool:
        """Whether the queue was another library's when it was last looked at."""
        return self._refusal is not None

    async def check(self) -> None:
        """Look at the queue.

        Raises:
            ForeignQueue: it is another library's.
        """
        before, self._looked_at = self._looked_at, monotonic()
        try:
            suspicion = await self._look()
        except ForeignQueue as error:
            self._refusal = str(error)
            raise
        except BaseException:
            self._looked_at = before
            raise
        self._refusal = None
        self._tell(suspicion)

    async def check_now_and_then(self) -> None:
        """Look at the queue, unless that was done a moment ago; what was found then still counts.

        Raises:
            ForeignQueue: it is another library's.
        """
        if monotonic() - self._looked_at >= LOOK_SECONDS:
            await self.check()
        elif self._refusal is not None:
            raise ForeignQueue(self._refusal)

    def forget(self) -> None:
        """Forget the event loop, by whose clock the last look was."""
        self._looked_at = float("-inf")

    def _tell(self, suspicion: Reply) -> None:
        if suspicion and not self._told:
            self._told = True
            _LOG.warning("%s", suspicion.decode(errors="replace") if isinstance(suspicion, bytes) else suspicion)
