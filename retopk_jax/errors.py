"""Errors that name the argument, its value and what would be accepted."""


class RetopkError(ValueError):
    """Base of every error this package raises on bad input."""


class ConfigError(RetopkError):
    """A setting is out of range or inconsistent with another."""


class PromptError(RetopkError):
    """A prompt cannot be used."""


class CapacityError(RetopkError):
    """Tokens would not fit the key-value cache, the model's positions or the device's memory."""


class ContextError(RetopkError):
    """A stored context is damaged, or does not fit what it is to be used with."""
