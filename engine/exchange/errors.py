"""The error of moving weights in or out."""


class ExchangeError(Exception):
    """What was asked for cannot be read, written, or is in the way: not a damaged checkpoint."""
