"""Routes of operators: weights, sleep, profiles, load."""
