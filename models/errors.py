"""What can go wrong with a model, a checkpoint or a tokenizer."""


class ModelError(ValueError):
    """Base of every error that `models` raises about its input."""


class ConfigError(ModelError):
    """A configuration that is incomplete, inconsistent or of an unsupported kind."""


class CheckpointError(ModelError):
    """Files that are missing, damaged, or do not hold the model that their config describes."""


class TokenizerError(ModelError):
    """A tokenizer that is missing or cannot be read."""


class ChatTemplateError(ModelError):
    """A chat template that is missing, malformed, refused, or that rejects the messages."""
