"""Long-context decoding that recalls supports instead of ranking every key."""
