"""A server's part in snapshots: in goes a request to freeze, write or load, out come shard files and what was written.

Read first `snapshot_service`, the operations; then `snapshot_writer`, the threads that write from one moment of the
tables. `snapshot_check` compares the tables of the workers with those of a folder that was loaded.
"""
