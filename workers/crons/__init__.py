"""What recurs: definitions, their times, and a queue's book of them."""

from workers.crons.book import Crons, CronStatus
from workers.crons.definition import Cron, Missed

__all__ = ["Cron", "CronStatus", "Crons", "Missed"]
