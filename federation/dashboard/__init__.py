"""The dashboard of a node: the queues' pages, and what only a node knows. Nothing of it is on the federation port."""
