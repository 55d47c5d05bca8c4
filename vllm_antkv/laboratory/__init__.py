"""The methods of the literature, to be measured against: KIVI, KVQuant, SKVQ, TurboQuant, LogQuant, H2O and others.

One file each. None of them is served, and nothing that serves imports them; `evaluate.methods` has the tables of names.
"""
