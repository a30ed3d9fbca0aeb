"""The `Role` of this process, read from its launcher's environment.

Start with `role`.
"""
