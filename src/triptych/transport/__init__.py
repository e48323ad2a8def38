"""Moving KV blocks between processes: one contract, several ways."""
