"""Protobuf to core values and back, and the client side of a call."""
