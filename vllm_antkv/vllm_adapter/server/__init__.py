"""What a running server shows of itself: status and metrics."""
