"""Objectives on arrays: no model, no config, no batch object enters here.

Each returns the objective of every response token, which is *maximised*. How
tokens are averaged is decided by weights (`training/packing.py`).
"""
