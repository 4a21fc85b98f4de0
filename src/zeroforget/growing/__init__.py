"""Networks that grow a task at a time and cannot forget."""
