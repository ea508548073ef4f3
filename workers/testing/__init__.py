"""The conformance suite that every storage passes, and storages that fail on purpose, for tests of your own."""

from workers.testing.case import GUARANTEES, Case, Need, Verdict, run
from workers.testing.cases import all_cases
from workers.testing.certification import CaseResult, Certificate, Finding, as_json, certify, table
from workers.testing.faults import Fault, Faults, RandomFaults, counting, faulty
from workers.testing.harness import Harness, HarnessFailed, MemoryHarness
from workers.testing.url_harness import UrlHarness

__all__ = [
    "GUARANTEES",
    "Case",
    "CaseResult",
    "Certificate",
    "Fault",
    "Faults",
    "Finding",
    "Harness",
    "HarnessFailed",
    "MemoryHarness",
    "Need",
    "RandomFaults",
    "UrlHarness",
    "Verdict",
    "all_cases",
    "as_json",
    "certify",
    "counting",
    "faulty",
    "run",
    "table",
]
