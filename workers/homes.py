"""Which event loop, of which process, something belongs to that cannot leave it: sockets, tasks, locks."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass, field
from typing import Self


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """An event loop and the process it runs in. A fork copies the loop, but not what runs it."""

    loop: asyncio.AbstractEventLoop
    pid: int = field(default_factory=os.getpid)

    @classmethod
    def here(cls) -> Self:
        """The running loop, in this process."""
        return cls(asyncio.get_running_loop())

    @property
    def is_here(self) -> bool:
        """Whether this is called in that loop, in that process."""
        return self.pid == os.getpid() and asyncio.get_running_loop() is self.loop

    @property
    def is_gone(self) -> bool:
        """Whether nothing can run there any more: the loop is closed, or was another process's."""
        return self.pid != os.getpid() or self.loop.is_closed()
