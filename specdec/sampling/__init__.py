"""Sampling: logits to distributions, and the counter-based noise that draws from them."""
