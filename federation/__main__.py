"""`python -m federation` is the `federation` command."""

from federation.cli import main

main()
