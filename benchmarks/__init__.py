"""Benchmarks: host time, kernels and whole models, side by side with their peers."""
