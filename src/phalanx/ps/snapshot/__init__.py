"""Snapshots of tables and dense parameters: consistent, full or delta, readable at any number of servers.

In: tables of all servers, at one moment of training. Out: files in a folder, complete or not there, read again by any
number of servers. Start with `save`, then `manifest`; `read` is the way back.
"""
