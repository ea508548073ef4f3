"""Middlewares for every worker: a log line, a measurement and a trace span per attempt.

What needs a package of its own is imported by its module: `workers.middlewares.prometheus` (the extra `metrics`) and
`workers.middlewares.opentelemetry` (the extra `otel`).
"""

from workers.middlewares.logging import AttemptFilter, log_attempts
from workers.middlewares.metrics import Metrics, measure_attempts
from workers.middlewares.outcome import Outcome, outcome_of

__all__ = ["AttemptFilter", "Metrics", "Outcome", "log_attempts", "measure_attempts", "outcome_of"]
