"""Recurring work of a node: each job runs on one process at a time, however many there are."""
