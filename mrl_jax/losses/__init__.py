"""Objectives on arrays: no model, no config, no batch object enters here.

Each returns what is to be *maximised*, a value for every response token. How
tokens are averaged is a matter of weights (`training/batch.py`).
"""
