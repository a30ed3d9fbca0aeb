"""`px.train_step`: forward, loss, backward and update as one call.

In: a model, optimizer, loss and batch. Out: the loss, and updated parameters. Start with `step`.
"""
