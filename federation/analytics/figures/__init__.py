"""The computations: frames from frames, by Spark's own functions. No file is opened here, and no database asked."""
