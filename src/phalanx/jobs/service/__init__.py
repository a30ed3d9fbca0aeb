"""The verbs of people on the store: submit, watch, stop, configure; and what a submission must pass.

Start with `service`.
"""
