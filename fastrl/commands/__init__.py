"""What the commands do: from flags to a run folder."""
