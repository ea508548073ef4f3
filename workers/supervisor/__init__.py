"""Several processes on the same queues, kept running by a supervisor that does no work of its own."""

from workers.supervisor.child import Command
from workers.supervisor.machine import parse_bytes, parse_processes, processors
from workers.supervisor.membership import Introduction, Membership
from workers.supervisor.slot import Pace, Report
from workers.supervisor.supervisor import Plan, Supervisor

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
