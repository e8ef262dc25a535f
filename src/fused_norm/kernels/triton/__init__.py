"""What the Triton kernels of all operators share, and what launches them."""
