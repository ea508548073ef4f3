"""What comes in and goes out: the application's tables, exports, results on disk, and their publication."""
