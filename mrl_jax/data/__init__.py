"""Prompts: their sources, and the order in which they are read."""
