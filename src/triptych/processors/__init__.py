"""From a prompt with markers and decoded media to an expanded, positioned, identified plan. No torch."""
