"""What moves the bytes. Same plan, same result, whichever it is."""
