"""What belongs to the optimizer and is right under every placement: clipping, LARS, LAMB, averages, accumulation."""
