"""Threads with connections to an SQLite file, made by hand for speed; aiosqlite would do without.

A transition is one hop to a thread, not one per statement, and its statements go past SQLAlchemy.
"""
