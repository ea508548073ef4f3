"""A dashboard of queues and workers in the browser (extra `dashboard`); `python -m workers.dashboard URL` serves it.

Another package builds a larger one from the same parts: see `site.SitePart`.
"""
