"""The page at `/`: chat with the served model, and a live view of the engine."""
