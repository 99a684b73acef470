"""Learning from segments that arrive when they arrive."""
