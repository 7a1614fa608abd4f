"""The compiler's passes: each takes the previous stage's record and returns the next."""
