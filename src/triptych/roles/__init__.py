"""One file per process role, reading top to bottom as the life of a request in that process; its parts beside it."""
