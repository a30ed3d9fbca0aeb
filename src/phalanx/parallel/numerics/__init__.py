"""`check_nan_inf`: find NaN and infinity in a step, and name module, operator, tensor, rank and sample."""
