"""Communication between our own processes: messages, channels, the control page, the gate."""
