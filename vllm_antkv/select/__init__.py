"""Which tokens keep more than their codes: anchors, sinks, recent tokens."""
