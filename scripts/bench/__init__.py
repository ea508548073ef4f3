"""What the `bench_*.py` beside this package measure with, and how they show results."""
