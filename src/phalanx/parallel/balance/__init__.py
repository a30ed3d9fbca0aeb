"""Load balancing: ranks of unequal speed get unequal parts of each global batch."""
