"""A Hugging Face model offline: reading it, and attending through codes and exact rows.

Calibration and evaluation stand on it, and it on neither; serving knows nothing of it.
"""
