"""Build of a checked program on disk from a source, in a builder process."""
