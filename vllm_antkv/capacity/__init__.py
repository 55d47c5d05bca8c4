"""What a GPU holds and does with each cache, from sizes alone: `antkv plan`."""
