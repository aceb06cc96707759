"""Decoding of a language model's logits to text. Pure."""
