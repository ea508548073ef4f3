"""What the results say to their readers: a page, and a summary for programs."""
