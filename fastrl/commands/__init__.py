"""The commands: from flags to a run in its folder."""
