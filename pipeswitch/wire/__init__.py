"""Between clients and server: frames, sockets, keys, addresses."""
