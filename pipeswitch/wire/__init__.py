"""Communication between clients and server: frames, sockets, keys, addresses."""
