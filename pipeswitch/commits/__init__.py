"""A job's commits: the shared area, its image, the files on disk."""
