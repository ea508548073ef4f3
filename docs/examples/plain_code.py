"""Code without `async` waits for a result: `python plain_code.py`, beside `python -m workers run plain_code:queue`."""

from workers import Queue, sync
from workers.storage.file import FileStorage

queue = Queue(FileStorage("jobs"))
queue.execute({"greet": lambda job: f"hello, {job.payload}"})

if __name__ == "__main__":
    with sync.Queue(FileStorage("jobs")) as jobs:
        print(jobs.enqueue_and_wait("alice", name="greet"))
