"""Between our own processes: messages, the channel that carries them, the control page."""
