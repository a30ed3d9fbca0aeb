"""`px.train_step`: forward, loss, backward and update as one call.

Start with `step`.
"""
