"""What a run writes: metrics, progress, model card, report and figures, uploads to the Hub."""
