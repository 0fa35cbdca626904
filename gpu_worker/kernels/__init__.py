"""Triton kernels of the worker: one kernel and its launcher a file, each with a torch twin of the same name in reference/."""
