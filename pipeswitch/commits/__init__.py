"""A job's commits: the area in shared memory, the image in it, and the files on disk."""
