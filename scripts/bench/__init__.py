"""What `bench_queue.py` measures, and how it shows it."""
