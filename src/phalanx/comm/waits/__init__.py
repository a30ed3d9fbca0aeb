"""Waits for other ranks: timeouts of collectives, pauses between two looks, and the seconds waited so far.

In: a collective call, or something to look at again and again. Out: how long it may take, and how long ranks have
waited, which hang reports show. Start with `timeouts`.
"""
