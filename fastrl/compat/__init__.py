"""What serves the programs of other libraries."""
