"""Snapshots of tables and dense parameters: consistent, full or delta, readable at any number of servers."""
