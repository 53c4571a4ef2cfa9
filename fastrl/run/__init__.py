"""Everything that a run writes: its folder, metrics, progress, model card, report, uploads."""
