"""Files that last: locks, atomic writes, hashes, checked JSON and paths. Knows nothing of the rest of the package."""
