"""Seconds that a test waits for an event.

Only a hanging test reaches it, so that no result depends on a machine's speed or load.
"""

PATIENCE = 900
