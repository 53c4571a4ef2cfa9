"""What looks at runs from outside: commands, reports, the demo, recipes."""
