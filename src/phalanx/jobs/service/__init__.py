"""The jobs service: submit, watch, stop and configure jobs, with permissions and validation.

In: verbs of the `Jobs` protocol, and who calls. Out: jobs with code and data pinned, in the store, or an error that
names the field or the missing right. Start with `service`, then `resolve`.
"""
