"""GPTQ checkpoints in AutoGPTQ's format: reading, packing, linear layers on packed weights."""
