"""Tensors: the text decoder, the towers, and the weights that fill them."""
