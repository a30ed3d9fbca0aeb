"""What runs on one GPU: every test with the marker `gpu`, and benchmarks; `python -m benchmarks.gpu` writes a page."""
