"""What concerns this process alone: its random generators, log handler, shared tensors, and where its script is.

In: nothing but the process. Out: `RandomState` (saved with checkpoints, restored for each replica), a default log
handler, tensors that travel to loader workers without /dev/shm, the line of the script for a message, and how many
collectives were issued. Talks to no other rank. Start with `random_state`.
"""
