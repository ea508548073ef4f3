"""A week of outages in a fraction of a second: the shipped node among simulated servers, under a virtual clock.

`planner` and `surprises` make a plan of a seed, `world` and `incidents` run it, `node` runs the shipped workers and
kills them, `servers` answers, `records` writes down what happens. `invariants` judges how it ends, and with `attempts`,
`pace`, `looks`, `promptness` and `asked` how it came about.
"""
