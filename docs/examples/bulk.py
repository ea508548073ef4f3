"""A thousand jobs with one call: `python bulk.py`, then `python -m workers run bulk:queue`."""

from workers import JobSpec, Queue, sync
from workers.storage.file import FileStorage

queue = Queue(FileStorage("jobs"))
queue.execute(lambda job: print(job.payload))

if __name__ == "__main__":
    with sync.Queue(FileStorage("jobs")) as jobs:
        done = jobs.enqueue_many(JobSpec(payload=number) for number in range(1000))
        print("enqueued:", len(done))
