"""The shop on taskiq.

taskiq worker old:broker
taskiq scheduler old:scheduler --update-interval 1
python old.py
"""

import asyncio
import os
from datetime import UTC, datetime, timedelta
from typing import Annotated

from taskiq import AsyncTaskiqTask, Context, SmartRetryMiddleware, TaskiqDepends, TaskiqScheduler
from taskiq.schedule_sources import LabelScheduleSource
from taskiq_redis import ListRedisScheduleSource, RedisAsyncResultBackend, RedisStreamBroker

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")
later = ListRedisScheduleSource(URL)
broker = (
    RedisStreamBroker(URL)
    .with_result_backend(RedisAsyncResultBackend(URL, result_ex_time=3600))
    .with_middlewares(SmartRetryMiddleware(default_delay=1, schedule_source=later))
)
scheduler = TaskiqScheduler(broker, [LabelScheduleSource(broker), later])


@broker.task
async def send(to: str, text: str) -> str:
    return f"sent {text} to {to}"


@broker.task(retry_on_error=True, max_retries=5)
async def charge(order: int, context: Annotated[Context, TaskiqDepends()]) -> str:
    attempt = int(context.message.labels.get("_retries", 0)) + 1
    if attempt == 1:
        raise ConnectionError("the bank is busy")
    return f"charged order {order} in attempt {attempt}"


@broker.task(schedule=[{"interval": 1}])  # or {"cron": "0 3 * * *"}
async def clean_up() -> None:
    print("cleaned up")


async def main() -> None:
    await broker.startup()
    task_id, moment = broker.id_generator(), datetime.now(UTC) + timedelta(seconds=1)
    await send.kicker().with_task_id(task_id).schedule_by_time(later, moment, "carol", text="good morning")
    scheduled = AsyncTaskiqTask(task_id, broker.result_backend)
    for task in (await send.kiq("bob", text="hello"), await charge.kiq(7), scheduled):
        print((await task.wait_result(timeout=30)).return_value)
    await broker.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
