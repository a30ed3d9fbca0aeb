"""Make a model train on all ranks: the Plan applied, gradients averaged, learning rates scaled."""
