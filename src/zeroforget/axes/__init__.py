"""Which dimensions of which tensors are the same feature axis, found by watching a network run."""
