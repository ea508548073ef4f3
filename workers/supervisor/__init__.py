"""Several processes on the same queues, kept running by a supervisor that does no work of its own."""

from workers.supervisor.child import Command
from workers.supervisor.membership import Introduction, Membership
from workers.supervisor.slot import Pace, Report
from workers.supervisor.supervisor import Plan, Supervisor, parse_bytes, parse_processes, processors

__all__ = [
    "Command",
    "Introduction",
    "Membership",
    "Pace",
    "Plan",
    "Report",
    "Supervisor",
    "parse_bytes",
    "parse_processes",
    "processors",
]
