"""What the storages on a Redis or Valkey server share, whatever the layout of their keys."""
