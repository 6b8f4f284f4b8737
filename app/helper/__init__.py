"""The helper process: runs clients' work that may not end, where it can be killed."""
