"""Decoding of a language model's logits into text."""
