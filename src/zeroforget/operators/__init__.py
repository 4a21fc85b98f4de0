"""Linear layers and convolutions whose newborn weights alone get gradients, plain and on GPUs. Knows torch alone."""
