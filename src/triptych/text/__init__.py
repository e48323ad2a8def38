"""Text: a checkpoint's own tokenizer and chat template, detokenising and stop strings. No torch, no transformers."""
