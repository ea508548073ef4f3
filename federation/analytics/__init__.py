"""Server-registry analytics: a Spark batch over the registry, health events and delivery attempts.

Importing this package imports no pyspark; its modules do (extra `analytics`).
"""

from typing import Final

__all__ = ["REPORT_FILE"]

REPORT_FILE: Final = "report.html"
"""In OUT. Here, because the dashboard shows the report where no Spark is installed."""
