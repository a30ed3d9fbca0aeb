"""What a training run costs before it runs: time and memory from shapes and hardware alone (pure, no devices)."""
