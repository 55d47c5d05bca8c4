"""For every Python whose PYTHONPATH names this folder: little is garbage in a process that mostly imports vLLM.

With Python's own thresholds each of the many that these tests start spends an eighth of its start on looking for some.
"""

import gc

gc.set_threshold(100_000, 50, 1000)
