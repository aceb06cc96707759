"""What a model takes, measured, and the groups planned from it."""
