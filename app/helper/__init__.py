"""The helper process: runs client work that may not terminate, so that it can be killed."""
