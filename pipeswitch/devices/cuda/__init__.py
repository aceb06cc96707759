"""The cuda device. It has run on one GPU, an H200 (docs/gpu.md)."""
