"""Jobs in queues of Bull 1.x, which Node processes work on at the same time; see PROTOCOL.md."""

from workers.storage.bull.options import BullJob
from workers.storage.bull.storage import BullStorage, server_url

__all__ = ["BullJob", "BullStorage", "server_url"]
