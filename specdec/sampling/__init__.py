"""Logits -> distribution, counter-based noise."""
