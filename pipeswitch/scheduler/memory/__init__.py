"""Bytes of the device and of the host store, and what lies where."""
