"""Verifiers: the target's judgement of a draft, and the acceptance rules."""
