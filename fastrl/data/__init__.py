"""Data sets, chat templates, tokenisation and batches."""
