"""Text of the launcher: what a job begins with, which process failed first, and the last lines of its log."""
