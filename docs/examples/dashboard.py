"""Queues in the browser, served by a program of yours (extra `dashboard`): `python dashboard.py`."""

import os

import uvicorn

from workers import Queue
from workers.dashboard.access import Access
from workers.dashboard.application import queue_site
from workers.storage.file import FileStorage

site, _ = queue_site([Queue(FileStorage("jobs"))], access=Access(allow_actions=True))
if __name__ == "__main__":
    uvicorn.run(site.app, port=int(os.environ.get("PORT", "8765")), timeout_graceful_shutdown=3)
