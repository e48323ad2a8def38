"""Values and errors that travel between the other packages; stdlib and numpy only."""
