"""Attention over paged KV: one contract, several backends."""
