"""The path by which applications import `BullJob`; it lives in `bull.options`."""

from workers.storage.bull import BullJob

__all__ = ["BullJob"]
