"""`python -m federation.workers` delivers until SIGTERM or SIGINT, as `federation workers run` does."""

if __name__ == "__main__":  # before anything else, so that Ctrl-C is handled
    from federation.entry import main

    main(["workers", "run"])
else:
    from federation.service import start_federation_worker

    __all__ = ["start_federation_worker"]
