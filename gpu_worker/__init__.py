"""One worker: weights, KV memory and sampling of one GPU (or one rank, or the CPU). Knows plans, not requests."""
