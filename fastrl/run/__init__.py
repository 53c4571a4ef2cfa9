"""What a run leaves, and how it goes on: its files, uploads, random numbers and processes."""
