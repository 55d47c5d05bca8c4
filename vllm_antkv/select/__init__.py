"""Which tokens are kept beside their codes: anchors, sinks, recency."""
