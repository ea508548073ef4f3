"""A week of outages in a fraction of a second: the shipped node among simulated servers, under a virtual clock.

`world` makes a plan of a seed, `node` runs the shipped workers and kills them, `servers` answers, `invariants` judges.
"""
