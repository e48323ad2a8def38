"""NVIDIA Dynamo's shipped frontend and TensorRT-LLM sidecar as a client of one engine: what ``scripts/dynamo`` runs."""
