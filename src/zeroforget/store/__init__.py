"""The model on disk: a folder that only ever gains files, each hashed, each task chained to the one before."""
