"""The files of a run: folder, metrics, report, model card, uploads."""
