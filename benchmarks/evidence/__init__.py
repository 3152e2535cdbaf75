"""What the quality experiments share: texts, documents, methods, resuming, metrics and plots."""
