"""Export and import full weights: safetensors, `torch.export`, ONNX.

In: a model or optimizer, spread over ranks. Out: one file with all of it, that other programs read, and back. Start
with `export`.
"""
