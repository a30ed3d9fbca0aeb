"""Events of a run: what a rank writes for `phalanx ps` and the console.

In: dictionaries. Out: JSON lines in the event file of this rank. Start with `event_file`.
"""
