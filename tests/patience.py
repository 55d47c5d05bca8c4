"""How long tests wait for what has to happen, in seconds.

No verdict may depend on how fast a machine is, or how busy: only what hangs takes longer.
"""

PATIENCE = 1500
