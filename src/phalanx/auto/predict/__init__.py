"""Described transformer runs in, their time and memory out: `px.predict`.

Pure. Start with `run_spec`, then `prediction`.
"""
