"""A training step as events.

In: seconds of single passes. Out: a timeline, a trace, a picture. Pure. Start with `events`.
"""
