"""Chaos on a Bull queue: workers in Node and workers of ours share it, and both are killed at random.

A *round* (`round.py`) has jobs that fail as often as their data says, a *crew* (`crew.py`) that is killed and replaced,
and a *verdict* (`verdict.py`) on what every process wrote into its ledger, which outlives it.
"""
