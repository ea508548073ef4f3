"""The documented place of the data source `federation`: other programs import it from here.

The code lies in `data/source.py`, and may move.
"""

from federation.analytics.data.source import read_table, register

__all__ = ["read_table", "register"]
