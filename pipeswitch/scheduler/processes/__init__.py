"""Workers, stages and their health."""
