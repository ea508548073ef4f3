"""What recurs."""
