"""The same shop.

python -m workers run new:tasks
python new.py
"""

import os
from datetime import timedelta

from workers import Job, Queue, Retry, Tasks
from workers.storage import open_storage

URL = os.environ.get("QUEUE_URL", "redis://127.0.0.1:6379/0?queue=shop")
tasks = Tasks(Queue(open_storage(URL)))


@tasks.task
def send(to: str, text: str) -> str:  # a plain function runs in a thread
    return f"sent {text} to {to}"


@tasks.task(max_attempts=5)
def charge(job: Job, order: int) -> str:
    if job.attempt == 1:
        raise Retry("the bank is busy", delay=timedelta(seconds=1))
    return f"charged order {order} in attempt {job.attempt}"


@tasks.cron("* * * * * *")  # or "0 3 * * *", timezone="Europe/Berlin"
def clean_up() -> None:
    print("cleaned up")


if __name__ == "__main__":
    with tasks.sync:
        print(send.sync.enqueue("bob", text="hello").result())
        print(charge.sync.enqueue(7).result())
        later = send.options(delay=timedelta(seconds=1)).sync
        print(later.enqueue("carol", text="good morning").result())
