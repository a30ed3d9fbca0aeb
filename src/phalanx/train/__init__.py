"""Training loops: `px.train_step`, `px.Model`, callbacks, losses, metrics, evaluation.

In: a model, loss, data. Out: a trained model: one call per step (`step`) or one for all epochs (`model`), with
callbacks and metrics over all ranks. Start with `distribute`, then `step`.
"""
