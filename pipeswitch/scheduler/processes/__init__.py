"""Workers, preprocessing processes, and their health."""
