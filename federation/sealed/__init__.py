"""The sealed wire: signed activities, sealed to each server's key, and acknowledged by signature."""
