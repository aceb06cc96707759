"""Inference requests, from arrival to answer."""
