"""Export and import full weights: safetensors, `torch.export`, ONNX.

Start with `export`.
"""
