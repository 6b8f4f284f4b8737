"""Routes for operators: health, statistics, weights, sleep, profiles."""
