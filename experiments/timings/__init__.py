"""What is timed for every operation: one file an operation, all of one shape (`case.py`)."""
