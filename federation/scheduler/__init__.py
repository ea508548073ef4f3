"""Recurring work of a node: each job on one process at a time, whatever number of them runs."""
