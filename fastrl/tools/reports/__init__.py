"""Runs, looked at from outside: figures, a page, and what a doctor finds in them."""
