"""Discrete-event simulation of a training step.

In: seconds of single passes. Out: a timeline, a trace, a picture. Pure. Start with `events`.
"""
