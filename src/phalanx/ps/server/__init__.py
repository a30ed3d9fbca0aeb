"""The server role: holds tables, applies pushes exactly once, logs them, takes snapshots."""
