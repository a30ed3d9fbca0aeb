"""The part of a rank in an elastic job: who the members are, and what one that joins takes over.

In: views of the launcher. Out: errors where a member is lost, and state for those that join. Start with `membership`.
"""
