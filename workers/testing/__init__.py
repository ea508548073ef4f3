"""The conformance suite every storage passes, and storages that fail on purpose, for tests of your own."""

from workers.testing.case import GUARANTEES, Case, Need, Verdict, run
from workers.testing.cases import all_cases
from workers.testing.faults import Fault, Faults, RandomFaults, counting, faulty
from workers.testing.harness import Harness, MemoryHarness

__all__ = [
    "GUARANTEES",
    "Case",
    "Fault",
    "Faults",
    "Harness",
    "MemoryHarness",
    "Need",
    "RandomFaults",
    "Verdict",
    "all_cases",
    "counting",
    "faulty",
    "run",
]
