"""The command line: the only place that builds objects and reads the environment."""
