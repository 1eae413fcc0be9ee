"""The decoder: one implementation, model families as data."""
