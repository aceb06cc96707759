"""The command line; it never imports torch."""
