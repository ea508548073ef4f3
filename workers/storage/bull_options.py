"""The path by which applications import `BullJob`; it lives in `bull.options`."""

from workers.storage.bull.options import BullJob

__all__ = ["BullJob"]
