"""A made-up history, for those who have no database to look at."""
