"""The demo model: its drawn world, its questions, its training and its exam."""
