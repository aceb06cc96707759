"""Many machines: Ray places, watches and restarts ordinary servers, and carries no request."""
