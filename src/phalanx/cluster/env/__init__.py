"""The registry of environment variables, and typed reads of them.

In: environment variables. Out: integers, endpoints and lists, or an error that names the variable; a warning for one
that is not supported. Start with `settings`.
"""
