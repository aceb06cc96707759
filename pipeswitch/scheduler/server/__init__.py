"""State of the whole server, and of one device with all decisions about it."""
