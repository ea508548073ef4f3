"""`python -m federation` is the `federation` command."""

from federation.entry import main

main()
