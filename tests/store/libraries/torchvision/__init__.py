"""Stands in for the library: its calling convention, and two small classifiers."""

__version__ = "9.1.0+test"
