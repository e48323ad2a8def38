"""OpenAI's HTTP API in front of engines: no torch, gRPC to the engines only."""
