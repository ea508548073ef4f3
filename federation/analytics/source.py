"""The documented place of the data source `federation`, whose code lies in `data/source.py`: programs of others import
it from here, wherever that goes.
"""

from federation.analytics.data.source import read_table, register

__all__ = ["read_table", "register"]
