"""`px.predict`: step time and memory of transformer run specs.

Pure. Start with `run_spec`, then `prediction`.
"""
