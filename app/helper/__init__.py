"""The helper process: work that clients bring and that may run away, where it can be killed."""
