"""`check_nan_inf`: find NaN and infinity in a step, and name module, operator, tensor, rank and sample.

In: tensors of a step that may be wrong. Out: the operator, rank and sample where NaN or infinity began, or a rank whose
bits differ from another's. Start with `nan_check`, then `audit`.
"""
