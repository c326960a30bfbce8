"""Distillation: train a small draft on text that the target itself writes."""
