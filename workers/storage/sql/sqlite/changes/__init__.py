"""What other processes commit to an SQLite file, heard from the kernel for speed; a look every 50 ms would do without.

An idle process looks once a second, and yet hears of a commit within a millisecond or two.
"""
