"""What happens at `optimizer.step()`, in one order (`session.StepPhase`), and what is done there whatever the Plan.

Start with `hooks`.
"""
