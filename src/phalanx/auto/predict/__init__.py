"""`px.predict`: step time and memory of transformer run specs.

In: a `RunSpec` (sizes of a transformer, degrees, precision) and a cluster. Out: seconds of a step by cause, bytes of
the peak rank, and an interval for both. Pure. Start with `run_spec`, then `prediction`.
"""
