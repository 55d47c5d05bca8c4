"""Where the cache lives: byte layout of the pages."""
