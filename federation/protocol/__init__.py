"""The bytes that travel between servers: keys, envelopes, signatures, activities, acks and URLs; no I/O."""
