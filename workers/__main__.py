"""`python -m workers` runs workers, and looks after their jobs."""

import sys

from workers.command import main

if __name__ == "__main__":
    sys.exit(main())
