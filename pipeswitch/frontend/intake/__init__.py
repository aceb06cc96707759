"""First steps of each request: checks of its values, a place in shared memory, the log."""
