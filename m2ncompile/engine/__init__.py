"""The vLLM front-end: real model classes on the meta device, as records.

The only package that imports vLLM, and only when asked to build something.
"""
