"""Programs that were written for TRL, as they are."""
