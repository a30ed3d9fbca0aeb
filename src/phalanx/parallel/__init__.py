"""Apply a Plan to a model: data, tensor, pipeline and context parallel, ZeRO, mixed precision, optimizers."""
