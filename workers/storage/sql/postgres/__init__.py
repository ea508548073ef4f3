"""The steps of a queue on PostgreSQL, as functions of the server: `steps.sql` and `keys.sql`."""
