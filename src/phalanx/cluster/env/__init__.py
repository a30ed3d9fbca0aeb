"""The registry of environment variables, and typed reads of them.

Start with `settings`.
"""
