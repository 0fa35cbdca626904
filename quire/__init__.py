"""Quire: the command and the Python API."""
