"""Tools for developers of this project, run from a checkout; none of them is installed."""
