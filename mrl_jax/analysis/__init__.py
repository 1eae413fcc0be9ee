"""Reads and draws runs and methods; training imports nothing of it."""
