"""The commands: from flags to a run and its folder."""
