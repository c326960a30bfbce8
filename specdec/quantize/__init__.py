"""Makes GPTQ checkpoints: rounding to nearest, and GPTQ on calibration text."""
