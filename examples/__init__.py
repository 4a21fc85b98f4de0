"""Notebooks and short programs to start from."""
