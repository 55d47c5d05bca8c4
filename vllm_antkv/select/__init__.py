"""Which tokens stay in full precision: anchors, sinks, recency."""
