"""What is urgent runs first: `python prioritised.py`, then `python -m workers run prioritised:queue`."""

from workers import Queue, sync
from workers.storage.file import FileStorage

queue = Queue(FileStorage("jobs"))
queue.execute(lambda job: print(job.payload))

if __name__ == "__main__":
    with sync.Queue(FileStorage("jobs")) as jobs:
        jobs.enqueue("a newsletter", priority=10)
        jobs.enqueue("a new password")  # 0: the lower, the sooner
