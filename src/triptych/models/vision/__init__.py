"""Encoders of pictures, one file a family."""
