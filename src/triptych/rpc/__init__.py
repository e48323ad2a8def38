"""The gRPC server: one small servicer per service over whatever role stands behind it."""
