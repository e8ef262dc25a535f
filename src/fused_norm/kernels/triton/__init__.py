"""Functions that the Triton kernels of several operators call, and the code that launches kernels."""
