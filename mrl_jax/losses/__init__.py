"""Formulas on arrays: surrogates, ratios, bounds and KL estimates.

No model, config or batch enters here. A surrogate is the objective of every
response token, to be *maximised*. `update/objectives.py` puts the formulas
together; weights decide how tokens are averaged (`training/packing.py`).
"""
