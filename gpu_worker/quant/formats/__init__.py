"""One checkpoint format a file: its part of config.json, and its tensors -> the weights of weights.py."""
