"""The shop on Celery.

celery --app old worker --beat
python old.py
"""

import os

from celery import Celery

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")
app = Celery("old", broker=URL, backend=URL)
app.conf.beat_schedule = {"clean-up": {"task": "clean_up", "schedule": 1.0}}  # or crontab(hour=3, minute=0)


@app.task(name="send")
def send(to, text):
    return f"sent {text} to {to}"


@app.task(name="charge", bind=True, max_retries=4)
def charge(self, order):
    attempt = self.request.retries + 1
    if attempt == 1:
        raise self.retry(countdown=1)
    return f"charged order {order} in attempt {attempt}"


@app.task(name="clean_up")
def clean_up():
    print("cleaned up")


if __name__ == "__main__":
    print(send.delay("bob", text="hello").get(timeout=30))
    print(charge.delay(7).get(timeout=30))
    print(send.apply_async(("carol",), {"text": "good morning"}, countdown=1).get(timeout=30))
