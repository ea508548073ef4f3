"""What is computed: frames from frames, by Spark's own functions; no file is opened here, and no database asked."""
