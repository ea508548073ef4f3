"""The shop on procrastinate, which keeps no results: the worker prints them.

python -m procrastinate --app=old.app schema --apply  # once
python -m procrastinate --app=old.app worker
python old.py
"""

import asyncio
import os

from procrastinate import App, PsycopgConnector, RetryStrategy

app = App(connector=PsycopgConnector(conninfo=os.environ.get("DATABASE_URL", "postgresql:///shop")))


@app.task(name="send")
async def send(to, text):
    print(f"sent {text} to {to}")


@app.task(name="charge", pass_context=True, retry=RetryStrategy(max_attempts=4, wait=1))
async def charge(context, order):
    attempt = context.job.attempts + 1
    if attempt == 1:
        raise ConnectionError("the bank is busy")
    print(f"charged order {order} in attempt {attempt}")


@app.periodic(cron="* * * * * */1")  # or "0 3 * * *"
@app.task(name="clean_up")
async def clean_up(timestamp):
    print("cleaned up")


async def main():
    async with app.open_async():
        await send.defer_async(to="bob", text="hello")
        await charge.defer_async(order=7)
        await send.configure(schedule_in={"seconds": 1}).defer_async(to="carol", text="good morning")


if __name__ == "__main__":
    asyncio.run(main())
