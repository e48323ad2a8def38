"""Moving blocks of memory between processes: one contract, several ways."""
