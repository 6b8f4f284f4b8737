"""What persists on the device between steps, one fixed row per slot."""
