"""Training jobs: client requests for them, their order, their turns and their ends."""
