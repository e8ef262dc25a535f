"""Writes the norm layer as a repository for the Hugging Face kernels hub."""
