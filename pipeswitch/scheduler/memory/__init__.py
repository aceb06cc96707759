"""Memory of the device and of the host store, and its owners."""
