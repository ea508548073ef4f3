"""A job that is there exactly if your own writes are: `python in_your_transaction.py`."""

import asyncio

from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from workers import Queue
from workers.storage.sql import SqlStorage


async def main() -> None:
    engine = create_async_engine("sqlite+aiosqlite:///shop.sqlite3")
    storage = SqlStorage(engine, "orders")  # the queue's tables lie beside the application's own
    await storage.migrate()
    async with engine.begin() as connection:
        await connection.execute(text("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY)"))
    queue = Queue(storage)  # it need not be started: its first jobs go over your connection
    for is_paid in (True, False):
        try:
            async with engine.begin() as connection:
                await connection.execute(text("INSERT INTO orders DEFAULT VALUES"))
                await queue.enqueue({"is_paid": is_paid}, name="confirm", connection=connection)
                if not is_paid:
                    raise RuntimeError("the card was declined: neither the order nor the job was ever there")
        except RuntimeError as error:
            print(error)
    async with engine.connect() as connection:
        orders = (await connection.execute(text("SELECT count(*) FROM orders"))).scalar_one()
    print("orders:", orders, "jobs:", sum((await queue.counts()).values()))
    await queue.stop()
    await engine.dispose()


if __name__ == "__main__":
    asyncio.run(main())
