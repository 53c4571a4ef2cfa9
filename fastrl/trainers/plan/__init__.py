"""What a run needs of memory, computed before it by the run's code on tensors without memory."""
