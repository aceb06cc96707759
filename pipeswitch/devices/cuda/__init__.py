"""The cuda device. This code has met a fake of the bindings only, never a GPU."""
