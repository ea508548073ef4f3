"""The same shop.

python -m workers run new:tasks
python new.py
"""

import os
from datetime import timedelta

from workers import Job, Queue, RetryPolicy, Tasks, sync
from workers.storage import open_storage

URL = os.environ.get("QUEUE_URL", "redis://127.0.0.1:6379/0?queue=shop")
tasks = Tasks(Queue(open_storage(URL), concurrency=8))


@tasks.task
def send(to: str, text: str) -> str:  # a plain function runs in a thread
    return f"sent {text} to {to}"


@tasks.task(max_attempts=5, retry=RetryPolicy(initial=timedelta(seconds=1)))
def charge(job: Job, order: int) -> str:
    if job.attempt == 1:
        raise ConnectionError("the bank is busy")
    return f"charged order {order} in attempt {job.attempt}"


@tasks.cron("* * * * * *")  # or "0 3 * * *", timezone="Europe/Berlin"
def clean_up() -> None:
    print("cleaned up")


if __name__ == "__main__":
    with sync.Queue(open_storage(URL)) as jobs:
        print(jobs.enqueue_and_wait({"to": "bob", "text": "hello"}, name="send"))
        print(jobs.enqueue_and_wait({"order": 7}, name="charge", max_attempts=5))
        later = {"to": "carol", "text": "good morning"}
        print(jobs.enqueue_and_wait(later, name="send", delay=timedelta(seconds=1)))
