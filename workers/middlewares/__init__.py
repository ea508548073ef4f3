"""Middlewares for every worker: a log line, a measurement and a trace span per attempt.

A middleware that needs another package has a module of its own: `workers.middlewares.prometheus` (the extra `metrics`)
and `workers.middlewares.opentelemetry` (the extra `otel`).
"""

from workers.middlewares.logging import AttemptFilter, log_attempts
from workers.middlewares.metrics import JobMeter, Metrics, measure_attempts
from workers.middlewares.outcome import Outcome, outcome_of

__all__ = ["AttemptFilter", "JobMeter", "Metrics", "Outcome", "log_attempts", "measure_attempts", "outcome_of"]
