"""The launcher: start the processes of a job, watch them, show what they say, and end them all together.

Nothing here imports torch except what runs inside the fork server and its children (`preload`, `entry`,
`store`, `link`).
"""
