"""Ahead-of-time compiler for weight transfer from trainers to inference workers."""

__version__ = "0.1.0"
