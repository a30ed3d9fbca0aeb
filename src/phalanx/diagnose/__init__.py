"""Look at a machine and its settings before, or after, something went wrong."""
