"""The methods of the literature, to be measured against: KIVI, KVQuant, SKVQ, TurboQuant, LogQuant, H2O and others.

One file each. None of them is served. `registry` has the tables of names, and `python -m research.literature` compares.
"""
