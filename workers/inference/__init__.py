"""One request: load the program, wait for each group, run it."""
