"""Ways into other libraries; each module needs the library that it is for, and nothing here imports another."""
