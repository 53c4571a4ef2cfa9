"""What every method learns by: objectives over the tokens of responses."""
