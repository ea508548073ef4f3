"""What recurs: definitions, their times, and a queue's book of them."""

from workers.crons.book import Crons
from workers.crons.definition import Cron, CronStatus
from workers.jobs import Missed

__all__ = ["Cron", "CronStatus", "Crons", "Missed"]
