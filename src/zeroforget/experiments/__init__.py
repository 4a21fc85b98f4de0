"""Experiments from TOML files: run and resumed, searched, measured, and set as the paper's tables."""
