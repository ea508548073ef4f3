"""The common part of the storages on a Redis or Valkey server, whatever the layout of their keys."""
