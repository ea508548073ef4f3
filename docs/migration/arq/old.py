"""The shop on arq.

arq old.WorkerSettings
python old.py
"""

import asyncio
import os

from arq import Retry, create_pool, cron
from arq.connections import RedisSettings
from arq.worker import func

REDIS = RedisSettings.from_dsn(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"))


async def send(ctx, to, text):
    return f"sent {text} to {to}"


async def charge(ctx, order):
    if ctx["job_try"] == 1:
        raise Retry(defer=1)
    return f"charged order {order} in attempt {ctx['job_try']}"


async def clean_up(ctx):
    print("cleaned up")


class WorkerSettings:
    redis_settings = REDIS
    functions = [send, func(charge, max_tries=5)]
    cron_jobs = [cron(clean_up, second=set(range(60)))]  # or hour=3, minute=0


async def main():
    redis = await create_pool(REDIS)
    print(await (await redis.enqueue_job("send", "bob", text="hello")).result(timeout=30))
    print(await (await redis.enqueue_job("charge", 7)).result(timeout=30))
    later = await redis.enqueue_job("send", "carol", text="good morning", _defer_by=1)
    print(await later.result(timeout=30))


if __name__ == "__main__":
    asyncio.run(main())
