"""The steps of a queue on PostgreSQL, in functions of the server's own: `steps.sql` and `keys.sql`."""
