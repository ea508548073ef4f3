"""The results for their readers: a page, and a summary for programs."""
