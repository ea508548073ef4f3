"""Chaos on a BullMQ queue: workers in Node and workers of ours share it, and both are killed at random.

A round (`round.py`) has plain jobs, flows and a job scheduler; crew and verdict are those of `tests/chaos/bull`.
"""
