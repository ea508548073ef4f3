"""`python -m federation.workers` delivers until SIGTERM or SIGINT, as `federation workers run` does."""

from federation.service import start_federation_worker

__all__ = ["start_federation_worker"]

if __name__ == "__main__":
    from federation.cli import main

    main(["workers", "run"])
