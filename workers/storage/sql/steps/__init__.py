"""The steps of a queue that both databases share, in SQL that both understand."""
