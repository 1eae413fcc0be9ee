"""Figures, by matplotlib."""
