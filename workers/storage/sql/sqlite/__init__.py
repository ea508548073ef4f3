"""The steps of a queue in an SQLite file, decided in Python under the one write lock."""
