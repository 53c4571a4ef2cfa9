"""How long tests wait: no machine is so slow that it comes to that."""

# Seconds for what must come, such as the end of a program: ten times what the longest takes on two
# busy cores, so that only what hangs lasts so long.
PATIENCE = 1200
# And of what hangs in a test: nothing waits for its end, which is how a test knows that it did not.
LONG = 10 * PATIENCE
