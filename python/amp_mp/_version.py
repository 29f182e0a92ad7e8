"""The version, alone so that building needs no import."""

__version__ = "0.3.0"
