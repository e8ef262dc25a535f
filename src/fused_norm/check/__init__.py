"""One training step of a model, stock against fused, on the user's own machine."""
