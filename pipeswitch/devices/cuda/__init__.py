"""The cuda device. It has been tested with a fake of CUDA's bindings only, never on a GPU."""
