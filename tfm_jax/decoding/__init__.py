"""One speculative round, a verb a file: draft, grow, verify, accept, commit."""
