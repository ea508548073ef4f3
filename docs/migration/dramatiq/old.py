"""The shop on dramatiq.

dramatiq old --processes 1
python old.py
"""

import os

import dramatiq
from apscheduler.schedulers.background import BackgroundScheduler
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import CurrentMessage
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

URL = os.environ.get("REDIS_URL", "redis://127.0.0.1:6379/0")
broker = RedisBroker(url=URL)
broker.add_middleware(Results(backend=RedisBackend(url=URL)))
broker.add_middleware(CurrentMessage())
dramatiq.set_broker(broker)


@dramatiq.actor(store_results=True)
def send(to, text):
    return f"sent {text} to {to}"


@dramatiq.actor(store_results=True, max_retries=4, min_backoff=1000)
def charge(order):
    attempt = CurrentMessage.get_current_message().options.get("retries", 0) + 1
    if attempt == 1:
        raise ConnectionError("the bank is busy")
    return f"charged order {order} in attempt {attempt}"


@dramatiq.actor
def clean_up():
    print("cleaned up")


if __name__ == "__main__":
    recurring = BackgroundScheduler()  # dramatiq has none of its own
    recurring.add_job(clean_up.send, "interval", seconds=1)  # or "cron", hour=3
    recurring.start()
    print(send.send("bob", text="hello").get_result(block=True, timeout=30_000))
    print(charge.send(7).get_result(block=True, timeout=30_000))
    later = send.send_with_options(args=("carol",), kwargs={"text": "good morning"}, delay=1000)
    print(later.get_result(block=True, timeout=30_000))
    recurring.shutdown()
