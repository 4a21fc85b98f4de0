"""Networks that grow and cannot forget. Imports torch and nothing of ours."""
