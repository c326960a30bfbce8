"""Models: found, checked, loaded, and run over the paged pool."""
