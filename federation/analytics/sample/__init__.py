"""A made-up history, for whoever has no database to look at."""
