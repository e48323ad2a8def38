"""One file per process role; each reads top to bottom as the life of a request in that process."""
