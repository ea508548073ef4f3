"""Scorecards and reports of servers, with Spark.

Its commands parse their own arguments: see `federation/analytics/cli.py`, which is loaded when one of them is run.
"""

from __future__ import annotations

import typer

SETTINGS = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def analytics(context: typer.Context) -> None:
    """Make scorecards and a report of servers, with Spark."""
    from federation.analytics.cli import main

    main(context.args)
