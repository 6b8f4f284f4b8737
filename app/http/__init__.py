"""The HTTP face: routes, schemas, event streams."""
