"""Scorecards and reports of servers, with Spark.

These commands parse their own arguments: `scripts/registry_analytics.py` runs them on a cluster, with nothing of the
console script but its way of telling what is wrong.
"""

from __future__ import annotations

import typer

from federation.cli.problems import complete

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def analytics(context: typer.Context) -> None:
    """Scorecards and a report of servers, with Spark: run, export, report."""
    from federation.analytics.cli import main

    complete(lambda: main(context.args))
