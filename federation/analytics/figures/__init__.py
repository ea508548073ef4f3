"""What is computed: frames from frames, by Spark's own functions; no file and no database is known here."""
