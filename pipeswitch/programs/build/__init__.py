"""From a source to a checked program on disk, in a builder child."""
