"""`phalanx verify`: compare two runs of a script step by step, and name the first difference and its likely cause."""
