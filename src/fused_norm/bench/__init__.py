"""How fast: kernels, host and whole models, side by side with what else there is."""
