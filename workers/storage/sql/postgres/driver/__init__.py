"""Connections to PostgreSQL, made by hand for speed; psycopg's pool and its asyncio connection would do without.

A short statement costs less than a switch to a thread, a task or SQLAlchemy's way to the driver. So it is prepared
here, and sent and read in the event loop that wants it.
"""
