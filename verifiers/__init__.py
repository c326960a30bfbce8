"""Verifiers: what of a draft stays, and which token follows it."""
