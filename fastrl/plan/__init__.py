"""What a run needs of memory, before it is run: the trainers' own code on tensors without memory."""
