"""What a run needs of memory, before it is run: its own code on tensors without memory."""
