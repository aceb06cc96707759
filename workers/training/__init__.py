"""One training job: session, slice, gate, commits."""
