"""What failed for good runs again: `python -m workers run retry_failed:queue`, later `python retry_failed.py`."""

import asyncio
from pathlib import Path

from workers import Queue
from workers.storage.file import FileStorage

queue = Queue(FileStorage("jobs"), max_attempts=1)
queue.execute(lambda job: print(Path(job.payload).read_text()))  # fails while there is no such file

if __name__ == "__main__":
    again = queue.manage.retry_where(lambda job: getattr(job.last_error, "type", None) == "FileNotFoundError")
    print("queued again:", asyncio.run(again))
