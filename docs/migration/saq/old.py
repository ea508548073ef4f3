"""The shop on saq.

saq old.settings
python old.py
"""

import asyncio
import os
import time

from saq import CronJob, Queue

queue = Queue.from_url(os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0"), name="shop")


async def send(ctx, *, to, text):
    return f"sent {text} to {to}"


async def charge(ctx, *, order):
    attempt = ctx["job"].attempts
    if attempt == 1:
        raise ConnectionError("the bank is busy")
    return f"charged order {order} in attempt {attempt}"


async def clean_up(ctx):
    print("cleaned up")


settings = {
    "queue": queue,
    "functions": [send, charge],
    "cron_jobs": [CronJob(clean_up, cron="* * * * * */1")],  # or "0 3 * * *"
    "concurrency": 10,
}


async def main():
    await queue.connect()
    print(await queue.apply("send", to="bob", text="hello"))
    print(await queue.apply("charge", order=7, retries=5, retry_delay=1.0))
    print(await queue.apply("send", to="carol", text="good morning", scheduled=int(time.time()) + 1))
    await queue.disconnect()


if __name__ == "__main__":
    asyncio.run(main())
