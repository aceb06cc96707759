"""HTTP/1.1 below every protocol: connections, TLS, event streams."""
