"""Training loops: `px.train_step`, `px.Model`, callbacks, losses, metrics, evaluation."""
