"""Sampling completions on a mesh."""
