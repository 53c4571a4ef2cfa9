"""What runs in workers: a trainer of one library, and the commands that a benchmark gives it.

All libraries have the same surface as far as a side needs it, and run the same lines.
"""
