"""Chaos: producers and consumers that are killed, paused and cut off while a ledger tells what they were promised.

A *round* (`round.py`) is one queue in one fresh *place* (`places.py`). A *nursery* (`nursery.py`) forks producers and
consumers (`children.py`), which write down every call to the storage and its answer (`ledger.py`); the round kills them
and breaks the place under them, lets the rest finish in peace, and has the ledgers judged (`verdict.py`).
"""
