"""Plan, run, apply: pure bookkeeping, the torch code that obeys it, and the thread that joins them."""
