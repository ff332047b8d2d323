"""When the logits exist: all at once, chunk by chunk, recomputed, or consumed as soon as they are made."""
