"""Click-log (CTR) datasets with slots of variable length.

In: files of click logs, one line per sample. Out: batches of ids and offsets per slot, from memory or as a stream,
shuffled over ranks. Start with `slots`.
"""
