"""Context parallel: ranks share the sequences of modules, attention included."""
