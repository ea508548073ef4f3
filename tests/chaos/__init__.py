"""Chaos: producers and consumers that are killed, paused and cut off while a ledger tells what they were promised.

A *round* (`round.py`) is one queue in one fresh *place* (`places.py`). Its *crew* (`crew.py`) are producers and
consumers (`children.py`), forked by a *nursery* (`nursery.py`), who write down every call to the storage and its answer
(`ledger.py`). The round kills them and breaks the place under them, lets the rest finish in peace, and has the ledgers
judged (`verdict.py`).
"""
