"""What the `bench_*.py` beside it measure with, and how they show it."""
