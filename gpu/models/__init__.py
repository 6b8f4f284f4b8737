"""Models as executed: one decoder, one small file per family."""
