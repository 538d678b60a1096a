"""Compiling and launching kernels with less work on the host."""
