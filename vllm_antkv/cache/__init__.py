"""Where the cache lives: byte layout of the pages, their specs, their allocation."""
