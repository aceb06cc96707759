"""Measured profiles of models, and the layer groups planned from them."""
