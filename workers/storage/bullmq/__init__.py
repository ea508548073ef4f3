"""Jobs in queues of BullMQ, which Node processes and dashboards work on at the same time."""

from workers.storage.bullmq.processor import as_processor
from workers.storage.bullmq.server import metrics_of, server_url, stalls_of
from workers.storage.bullmq.storage import BullMQStorage

__all__ = ["BullMQStorage", "as_processor", "metrics_of", "server_url", "stalls_of"]
