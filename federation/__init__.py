"""Federation delivery: what application services import.

`enqueue_delivery`, `enqueue_fanout` and the producers owe deliveries inside the application's transaction;
`federation.sync` has the same calls for synchronous code. `start_federation_worker`, or `python -m federation.workers`,
delivers.
"""

from __future__ import annotations

import federation.interrupts  # noqa: F401 - acts when it is imported, and comes first: what follows takes a while

# isort: split
from importlib import import_module
from typing import TYPE_CHECKING

from federation.other_packages import refuse_foreign

if TYPE_CHECKING:
    from federation import sync
    from federation.base.errors import ConfigurationError
    from federation.base.queues.job_data import FederationDeliveryJob, HealthCheckJob
    from federation.base.queues.queue import DELIVERY_QUEUE_NAME, HEALTH_CHECK_QUEUE_NAME, JobQueue
    from federation.http.threat_policy import get_threat_policy
    from federation.protocol.keys import sign_message, verify_signature
    from federation.protocol.sealing import decrypt_payload, encrypt_payload
    from federation.service import (
        close_federation,
        discover_and_register,
        enqueue_delivery,
        enqueue_fanout,
        federation_fetch,
        get_federation_queue,
        get_health_check_queue,
        get_redis_connection,
        get_redis_worker_connection,
        handle_follow_ack,
        mark_server_healthy,
        mark_server_unhealthy,
        process_federation_delivery,
        process_health_check,
        publish_post,
        request_follow,
        request_unfollow,
        schedule_health_check,
        start_federation_worker,
        transaction,
    )

__all__ = [
    "DELIVERY_QUEUE_NAME",
    "HEALTH_CHECK_QUEUE_NAME",
    "ConfigurationError",
    "FederationDeliveryJob",
    "HealthCheckJob",
    "JobQueue",
    "close_federation",
    "decrypt_payload",
    "discover_and_register",
    "encrypt_payload",
    "enqueue_delivery",
    "enqueue_fanout",
    "federation_fetch",
    "get_federation_queue",
    "get_health_check_queue",
    "get_redis_connection",
    "get_redis_worker_connection",
    "get_threat_policy",
    "handle_follow_ack",
    "mark_server_healthy",
    "mark_server_unhealthy",
    "process_federation_delivery",
    "process_health_check",
    "publish_post",
    "request_follow",
    "request_unfollow",
    "schedule_health_check",
    "sign_message",
    "start_federation_worker",
    "sync",
    "transaction",
    "verify_signature",
]

_SERVICE = "federation.service"
_HOMES = {
    "ConfigurationError": "federation.base.errors",
    "get_threat_policy": "federation.http.threat_policy",
    "decrypt_payload": "federation.protocol.sealing",
    "encrypt_payload": "federation.protocol.sealing",
    "sign_message": "federation.protocol.keys",
    "verify_signature": "federation.protocol.keys",
    "DELIVERY_QUEUE_NAME": "federation.base.queues.queue",
    "HEALTH_CHECK_QUEUE_NAME": "federation.base.queues.queue",
    "JobQueue": "federation.base.queues.queue",
    "FederationDeliveryJob": "federation.base.queues.job_data",
    "HealthCheckJob": "federation.base.queues.job_data",
}

refuse_foreign()


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import names when they are first used: the `federation` command must start fast, to complete words."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name == "sync":
            return import_module("federation.sync")
        refuse_foreign()  # again: sys.path may have changed since
        value = getattr(import_module(_HOMES.get(name, _SERVICE)), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
