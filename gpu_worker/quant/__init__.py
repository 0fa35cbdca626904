"""Quantized linear layers: read a checkpoint's own format, keep few bits in memory, multiply. The model knows nothing of it."""
