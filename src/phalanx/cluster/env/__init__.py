"""The table of every environment variable read or written, and typed values read from them.

Start with `settings`.
"""
