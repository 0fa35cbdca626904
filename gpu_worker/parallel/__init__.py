"""Tensor parallelism: a copy of the model divided among ranks, each a process with a GPU (or a share of the CPU) of its own."""
