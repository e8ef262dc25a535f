"""Small faults in kernels, patcher and check, one line each, and which of them the tests catch."""
