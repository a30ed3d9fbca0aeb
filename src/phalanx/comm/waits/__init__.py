"""Waits for other ranks: timeouts of collectives, pauses between two looks, and the seconds waited so far."""
